// Threads that share the tiles of one op. They sleep when nothing comes for a while.
//
// An op cuts its output into tiles of its own choosing and passes a function that computes one.
// Workers claim tiles from an atomic counter, so a thread that the operating system holds back
// delays one tile only. Who computes a tile, and when, changes no bit: a tile's function may depend
// on the tile's number, never on the worker's.
//
// Workers never run on the core of the caller that woke them, if the process may use a core for
// each thread. Linux looks for an idle core only where it takes that to be cheap, so that a worker
// that slept on the caller's core would stay there, and the two take turns for a whole step.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

#include "loraplex/abi.h"

namespace loraplex {

// Memory that keeps its size from op to op; aligned to 64 bytes, contents undefined.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    Scratch(Scratch &&other) noexcept;
    ~Scratch();

    // At least num_bytes; what was there before is lost if it grows. Throws std::bad_alloc.
    void *at_least(std::size_t num_bytes);

private:
    void *data_ = nullptr;
    std::size_t num_bytes_ = 0;
};

}  // namespace loraplex

struct loraplex_pool {
public:
    explicit loraplex_pool(int num_threads);
    ~loraplex_pool();
    loraplex_pool(const loraplex_pool &) = delete;
    loraplex_pool &operator=(const loraplex_pool &) = delete;

    int num_threads() const { return static_cast<int>(threads_.size()) + 1; }
    void set_num_threads(int num_threads);

    // LORAPLEX_CPU_* that ops may use.
    std::uint64_t cpu_features() const { return cpu_features_; }
    void limit_cpu_features(std::uint64_t features);

    // fn(tile, worker) for tile in [0, num_tiles), worker in [0, num_threads()). Returns when all
    // are done. fn must not throw and must not call the pool. Tiles are started in rising order.
    // The caller must hold an `Op`.
    template <typename Fn>
    void parallel_for_tiles(std::int64_t num_tiles, const Fn &fn) {
        static_assert(std::is_invocable_v<const Fn &, std::int64_t, int>);
        run(num_tiles, &call<Fn>, &fn);
    }

    // The same by the caller alone, which needs no `Op`.
    template <typename Fn>
    static void serial_for_tiles(std::int64_t num_tiles, const Fn &fn) {
        for (std::int64_t tile = 0; tile < num_tiles; ++tile) {
            call<Fn>(&fn, tile, 0);
        }
    }

    // Of the op that runs; kept for the next one. Ask before parallel_for_tiles, not in a tile.
    void *shared_scratch(std::size_t num_bytes) { return shared_scratch_.at_least(num_bytes); }

    // The same, beside it: lists that an op needs before it knows how much memory it needs.
    void *list_scratch(std::size_t num_bytes) { return list_scratch_.at_least(num_bytes); }

    // One piece per worker: piece w starts at the result + w * (num_bytes rounded up to 64).
    void *worker_scratch(std::size_t num_bytes);
    static std::size_t worker_scratch_stride(std::size_t num_bytes) {
        return (num_bytes + 63) / 64 * 64;
    }

    std::mutex &op_mutex() { return op_mutex_; }

    std::int64_t lora_ns() const { return lora_ns_.load(std::memory_order_relaxed); }
    // The caller must hold an `Op`.
    void add_lora_ns(std::int64_t ns) {
        lora_ns_.store(lora_ns() + ns, std::memory_order_relaxed);
    }

private:
    using TileFunction = void (*)(const void *fn, std::int64_t tile, int worker);

    // Not inlined, so that what fn does is compiled once.
    template <typename Fn>
    __attribute__((noinline)) static void call(const void *fn, std::int64_t tile, int worker) {
        (*static_cast<const Fn *>(fn))(tile, worker);
    }

    void run(std::int64_t num_tiles, TileFunction function, const void *fn);
    void work(int worker);
    bool wait_for_tiles();
    void finish_tiles(int worker);
    bool has_tiles() const;
    void leave_callers_core();
    void start(int num_workers);
    void stop();

    // The job; written only while no worker holds a claim.
    TileFunction function_ = nullptr;
    const void *fn_ = nullptr;
    std::uint32_t num_tiles_ = 0;

    alignas(64) std::atomic<std::uint64_t> claims_{0};  // job number << 32 | tiles not yet claimed
    alignas(64) std::atomic<std::int64_t> unfinished_{0};
    alignas(64) std::atomic<int> num_sleeping_{0};
    std::atomic<bool> caller_sleeps_{false};
    std::atomic<bool> stopping_{false};
    std::mutex mutex_;
    std::condition_variable work_came_;
    std::condition_variable work_done_;

    std::uint64_t cpu_features_ = loraplex_cpu_features();
    std::vector<std::thread> threads_;
    int left_core_ = -1;  // where no worker may run; -1: none
    std::mutex op_mutex_;
    std::atomic<std::int64_t> lora_ns_{0};
    loraplex::Scratch shared_scratch_;
    loraplex::Scratch list_scratch_;
    loraplex::Scratch worker_scratch_;
};

namespace loraplex {

// Held by an op from its first use of the pool or its scratch memory to its end.
class Op {
public:
    explicit Op(loraplex_pool &pool) : lock_(pool.op_mutex()) {}

private:
    std::lock_guard<std::mutex> lock_;
};

}  // namespace loraplex
