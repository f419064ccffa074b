#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include <sys/mman.h>
#include <unistd.h>

#include "loraplex/channel.h"
#include "loraplex/program.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kSlotBytes = 128;

// The ranks of a channel are threads here, each with a mapping of its own.
class Ranks {
public:
    Ranks(int num_ranks, std::int64_t num_bytes) : fd_(memfd_create("selftest", 0)) {
        if (fd_ < 0 || ftruncate(fd_, num_bytes) != 0) {
            std::abort();
        }
        for (int rank = 0; rank < num_ranks; ++rank) {
            channels_.push_back(loraplex_channel_open(fd_, rank, num_ranks, kSlotBytes));
        }
    }
    explicit Ranks(int num_ranks)
        : Ranks(num_ranks, loraplex_channel_bytes(num_ranks, kSlotBytes)) {}
    ~Ranks() {
        for (loraplex_channel *channel : channels_) {
            loraplex_channel_close(channel);
        }
        close(fd_);
    }
    Ranks(const Ranks &) = delete;
    Ranks &operator=(const Ranks &) = delete;

    int fd() const { return fd_; }
    loraplex_channel *operator[](std::size_t rank) const { return channels_[rank]; }

    void run(const std::function<void(int rank, loraplex_channel *channel)> &body) const {
        std::vector<std::thread> threads;
        for (std::size_t rank = 0; rank < channels_.size(); ++rank) {
            threads.emplace_back(body, static_cast<int>(rank), channels_[rank]);
        }
        for (std::thread &thread : threads) {
            thread.join();
        }
    }

private:
    int fd_;
    std::vector<loraplex_channel *> channels_;
};

std::uint8_t byte_of(std::int64_t round, std::int64_t rank, std::int64_t index) {
    return static_cast<std::uint8_t>(round * 31 + rank * 7 + index);
}

// Rounds whose messages are from nothing to several slots long; ranks come early and late.
void test_rounds(Checks &checks, int num_ranks) {
    constexpr std::int64_t kRounds = 300;
    constexpr std::int64_t kLengths[] = {1, kSlotBytes, 0, 64, kSlotBytes + 1, 3 * kSlotBytes - 5};
    std::atomic<int> num_wrong{0};
    const Ranks ranks(num_ranks);
    ranks.run([&](int rank, loraplex_channel *channel) {
        Random random(static_cast<std::uint64_t>(rank));
        for (std::int64_t round = 0; round < kRounds; ++round) {
            const std::int64_t length = kLengths[round % std::size(kLengths)];
            std::vector<std::uint8_t> source(static_cast<std::size_t>(length));
            std::vector<std::uint8_t> target(source.size() * static_cast<std::size_t>(num_ranks));
            for (std::int64_t i = 0; i < length; ++i) {
                source[static_cast<std::size_t>(i)] = byte_of(round, rank, i);
            }
            if (random.below(8) == 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(random.below(300)));
            }
            num_wrong += loraplex_channel_gather(channel, length, source.data(), target.data()) !=
                         LORAPLEX_OK;
            for (std::int64_t i = 0; i < length * num_ranks; ++i) {
                num_wrong += target[static_cast<std::size_t>(i)] !=
                             byte_of(round, i / length, i % length);
            }
        }
    });
    checks.expect(num_wrong == 0, (std::to_string(num_ranks) + " ranks: bytes").c_str());
}

// A program holds the gather: it is made again with what the memory then contains.
void test_in_a_program(Checks &checks) {
    const Ranks ranks(2);
    std::atomic<int> num_wrong{0};
    ranks.run([&](int rank, loraplex_channel *channel) {
        std::int64_t source = 0, target[2] = {};
        const auto word = [](const void *pointer) {
            return reinterpret_cast<std::int64_t>(pointer);
        };
        const std::int64_t code[] = {loraplex_program_op("loraplex_channel_gather"),
                                     4, 0, word(channel), sizeof(source), word(&source),
                                     word(target)};
        for (std::int64_t round = 0; round < 10; ++round) {
            source = 10 * round + rank;
            num_wrong += loraplex_run_program(code, std::size(code), nullptr, 0) != LORAPLEX_OK;
            num_wrong += target[0] != 10 * round || target[1] != 10 * round + 1;
        }
    });
    checks.expect(num_wrong == 0, "in a program");
}

void test_abort(Checks &checks) {
    const Ranks ranks(3);
    std::atomic<int> num_aborted{0};
    ranks.run([&](int rank, loraplex_channel *channel) {
        if (rank == 2) {  // by now one rank sleeps
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            loraplex_channel_abort(channel, "rank 2 ended");
            loraplex_channel_abort(channel, "too late");
        } else {
            num_aborted += loraplex_channel_gather(channel, 0, nullptr, nullptr) ==
                           LORAPLEX_ABORTED;
        }
    });
    checks.expect(num_aborted == 2, "an abort ends the waits");
    checks.expect(loraplex_channel_abort_reason(ranks[0]) == std::string("rank 2 ended"), "reason");
    checks.expect(loraplex_channel_gather(ranks[0], 0, nullptr, nullptr) == LORAPLEX_ABORTED,
                  "an abort stays");
    checks.expect(loraplex_channel_wait_ns(ranks[0]) > 0, "the wait is counted");
}

void test_refusals(Checks &checks) {
    const Ranks ranks(2);
    std::atomic<int> num_refused{0};
    ranks.run([&](int rank, loraplex_channel *channel) {
        std::uint8_t source[2] = {}, target[4];
        num_refused += loraplex_channel_gather(channel, 1 + rank, source, target) ==
                       LORAPLEX_RANKS_DIFFER;
    });
    checks.expect(num_refused == 2, "other numbers of bytes");
    checks.expect(loraplex_channel_abort_reason(ranks[0]) == std::string(), "no reason");
    const std::int64_t num_bytes = loraplex_channel_bytes(2, kSlotBytes);
    checks.expect(Ranks(2, num_bytes - 1)[0] == nullptr, "a short segment");
    checks.expect(Ranks(2, num_bytes + 1)[0] == nullptr, "a long segment");
    checks.expect(loraplex_channel_open(ranks.fd(), 2, 2, kSlotBytes) == nullptr, "rank");
    checks.expect(loraplex_channel_open(ranks.fd(), -1, 2, kSlotBytes) == nullptr, "rank below");
    checks.expect(loraplex_channel_open(-1, 0, 2, kSlotBytes) == nullptr, "no file");
    for (const std::int64_t wrong : {std::int64_t{0}, std::int64_t{65}, std::int64_t{-64},
                                     std::int64_t{1} << 31}) {
        checks.expect(loraplex_channel_bytes(2, wrong) == -1, "bytes of a slot");
    }
    for (const std::int64_t wrong : {0, -1, LORAPLEX_CHANNEL_MAX_RANKS + 1}) {
        checks.expect(loraplex_channel_bytes(wrong, kSlotBytes) == -1, "ranks");
    }
}

}  // namespace

void test_channel(Checks &checks) {
    for (const int num_ranks : {1, 2, 3, 4}) {
        test_rounds(checks, num_ranks);
    }
    test_in_a_program(checks);
    test_abort(checks);
    test_refusals(checks);
}

}  // namespace loraplex::selftest
