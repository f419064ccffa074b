// What a CPU can do at best: fused multiply-adds of float32, and reading from memory.
//
// Compiled for the machine it runs on by machine_limits.py. A figure is the best of many short
// windows, in each of which all threads start together.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kSums = 24;  // of 32 registers; enough to hide the latency of two units
#elif defined(__AVX__)
constexpr int kVectorBytes = 32;
constexpr int kSums = 12;  // of 16 registers
#else
constexpr int kVectorBytes = 16;
constexpr int kSums = 12;
#endif

using Floats = float __attribute__((vector_size(kVectorBytes)));
using Words = std::int64_t __attribute__((vector_size(kVectorBytes)));
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(float));
constexpr int kStreams = 4;

template <typename Vector>
void keep(Vector &value) {
#if defined(__aarch64__)
    asm volatile("" : "+w"(value));
#else
    asm volatile("" : "+v"(value));
#endif
}

void multiply_add(std::int64_t steps) {
    Floats factor = Floats{} + 0.999f;
    Floats term = Floats{} + 0.001f;
    keep(factor);
    keep(term);
    Floats sums[kSums] = {};
    for (std::int64_t step = 0; step < steps; ++step) {
#pragma GCC unroll 24
        for (Floats &sum : sums) {
            sum = sum * factor + term;
            keep(sum);
        }
    }
}

void read(const std::byte *memory, std::int64_t num_bytes) {
    const std::int64_t stream = num_bytes / kStreams;
    Words sums[kStreams] = {};
    for (std::int64_t i = 0; i < stream; i += kVectorBytes) {
#pragma GCC unroll 4
        for (int s = 0; s < kStreams; ++s) {
            sums[s] ^= *reinterpret_cast<const Words *>(memory + s * stream + i);
        }
    }
    for (Words &sum : sums) {
        keep(sum);
    }
}

// Seconds of each window of body(thread, window), from the common start to the last end.
std::vector<double> windows(int num_threads, int num_windows,
                            const std::function<void(int, int)> &body) {
    using Clock = std::chrono::steady_clock;
    std::vector<double> seconds;
    std::atomic<int> arrived{0};
    std::atomic<int> finished{0};
    const auto work = [&](int thread) {
        for (int window = 0; window < num_windows; ++window) {
            arrived.fetch_add(1);
            while (arrived.load() < num_threads * (window + 1)) {
                std::this_thread::yield();
            }
            const auto start = Clock::now();
            body(thread, window);
            finished.fetch_add(1);
            while (finished.load() < num_threads * (window + 1)) {
                std::this_thread::yield();
            }
            if (thread == 0) {
                seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
            }
        }
    };
    std::vector<std::thread> threads;
    for (int thread = 0; thread < num_threads; ++thread) {
        threads.emplace_back(work, thread);
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds;
}

}  // namespace

extern "C" {

int vector_bytes() { return kVectorBytes; }

// Floating point operations in a second: the best window.
double multiply_add_rate(int num_threads) {
    constexpr std::int64_t kSteps = 5'000;
    constexpr double kOperations = 2.0 * kSteps * kSums * kLanes;
    const auto seconds = windows(num_threads, 500, [](int, int) { multiply_add(kSteps); });
    return num_threads * kOperations / seconds.front();
}

// Bytes in a second, each thread reading kStreams streams: the best window and the middle one.
// memory is aligned to a vector and larger than any cache; no part of it is read twice.
void read_rate(const std::byte *memory, std::int64_t num_bytes, int num_threads, double *best,
               double *median) {
    constexpr std::int64_t kWindowBytes = 4 << 20;
    const auto num_windows = static_cast<int>(num_bytes / (num_threads * kWindowBytes));
    const auto seconds = windows(num_threads, num_windows, [=](int thread, int window) {
        read(memory + (window * num_threads + thread) * kWindowBytes, kWindowBytes);
    });
    const double bytes = static_cast<double>(num_threads * kWindowBytes);
    *best = bytes / seconds.front();
    *median = bytes / seconds[seconds.size() / 2];
}

}  // extern "C"
