#include "channel_rounds.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <system_error>

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "loraplex/guard.h"
#include "spin.h"

namespace loraplex {
namespace {

constexpr std::int64_t kMaxSlotBytes = std::int64_t{1} << 30;
// Within it an abort is seen whose wake-up came just before the sleep.
constexpr timespec kLongestSleep{0, 100'000'000};
constexpr std::uint32_t kWritingReason = 1;
constexpr std::uint32_t kAborted = 2;
constexpr std::int64_t kSumFloats = 512;  // at once: in the nearest cache

// Without FUTEX_PRIVATE_FLAG: the word is shared by processes.
void sleep_while(std::atomic<std::uint32_t> &word, std::uint32_t value) {
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &kLongestSleep, nullptr, 0);
}

void wake_all(std::atomic<std::uint32_t> &word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Rounds wrap around; two ranks are never further apart than one round.
bool has_published(std::uint32_t published, std::uint32_t round) {
    return static_cast<std::int32_t>(published - round) >= 0;
}

}  // namespace
}  // namespace loraplex

loraplex_channel::loraplex_channel(int fd, std::int64_t rank, std::int64_t num_ranks,
                                   std::int64_t slot_bytes)
    : rank_(rank), num_ranks_(num_ranks), slot_bytes_(slot_bytes) {
    const std::int64_t num_bytes = loraplex_channel_bytes(num_ranks, slot_bytes);
    struct stat file;
    if (num_bytes < 0 || rank < 0 || rank >= num_ranks || fstat(fd, &file) != 0 ||
        file.st_size != num_bytes) {
        throw std::invalid_argument("channel");
    }
    void *segment = mmap(nullptr, static_cast<std::size_t>(num_bytes), PROT_READ | PROT_WRITE,
                         MAP_SHARED, fd, 0);
    if (segment == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category());
    }
    head_ = static_cast<loraplex::ChannelHead *>(segment);
    ranks_ = reinterpret_cast<loraplex::ChannelRank *>(head_ + 1);
    slots_ = reinterpret_cast<char *>(ranks_ + num_ranks);
    round_ = ranks_[rank].round.load();
}

loraplex_channel::~loraplex_channel() {
    munmap(head_, static_cast<std::size_t>(loraplex_channel_bytes(num_ranks_, slot_bytes_)));
}

void loraplex_channel::exchange(std::int64_t num_bytes) {
    using namespace loraplex;
    if (num_bytes < 0 || num_bytes > slot_bytes_) {
        throw std::invalid_argument("channel: bytes");
    }
    ++round_;
    ChannelRank &own = ranks_[rank_];
    own.num_bytes[round_ & 1].store(num_bytes, std::memory_order_relaxed);
    // Releases the slot. In one order with the look at the sleepers, as theirs is with their look
    // at the round: one of both sees the other.
    own.round.store(round_, std::memory_order_seq_cst);
    if (own.num_sleeping.load(std::memory_order_seq_cst) > 0) {
        wake_all(own.round);
    }
    const auto begin = std::chrono::steady_clock::now();
    for (std::int64_t rank = 0; rank < num_ranks_; ++rank) {
        if (rank != rank_) {
            wait_for(ranks_[rank]);
        }
    }
    const std::chrono::nanoseconds waited = std::chrono::steady_clock::now() - begin;
    wait_ns_.fetch_add(waited.count(), std::memory_order_relaxed);
    if (head_->aborted.load(std::memory_order_relaxed) != 0) {
        throw Failure(LORAPLEX_ABORTED);
    }
    for (std::int64_t rank = 0; rank < num_ranks_; ++rank) {
        if (ranks_[rank].num_bytes[round_ & 1].load(std::memory_order_relaxed) != num_bytes) {
            throw Failure(LORAPLEX_RANKS_DIFFER);
        }
    }
}

// Returns when the other rank has published this round, or the channel was aborted.
void loraplex_channel::wait_for(loraplex::ChannelRank &other) const {
    using namespace loraplex;
    const auto ended = [&] {
        return has_published(other.round.load(std::memory_order_acquire), round_) ||
               head_->aborted.load(std::memory_order_relaxed) != 0;
    };
    if (spin_until(ended)) {
        return;
    }
    other.num_sleeping.fetch_add(1, std::memory_order_seq_cst);
    while (!ended()) {
        const std::uint32_t published = other.round.load(std::memory_order_seq_cst);
        if (!has_published(published, round_)) {
            sleep_while(other.round, published);
        }
    }
    other.num_sleeping.fetch_sub(1, std::memory_order_relaxed);
}

void loraplex_channel::tree_sum(std::int64_t first, std::int64_t num_floats, float *target) const {
    for (std::int64_t done = 0; done < num_floats; done += loraplex::kSumFloats) {
        const std::int64_t count = std::min(loraplex::kSumFloats, num_floats - done);
        add_ranks(0, num_ranks_, first + done, count, target + done);
    }
}

void loraplex_channel::add_ranks(std::int64_t first_rank, std::int64_t num_ranks,
                                 std::int64_t first, std::int64_t num_floats,
                                 float *__restrict target) const {
    const float *const left = slot(first_rank) + first;
    if (num_ranks == 1) {
        std::copy_n(left, num_floats, target);
        return;
    }
    if (num_ranks == 2) {
        const float *const right = slot(first_rank + 1) + first;
        for (std::int64_t i = 0; i < num_floats; ++i) {
            target[i] = left[i] + right[i];
        }
        return;
    }
    std::int64_t num_left = 1;
    while (num_left * 2 < num_ranks) {
        num_left *= 2;
    }
    float right[loraplex::kSumFloats];
    add_ranks(first_rank, num_left, first, num_floats, target);
    add_ranks(first_rank + num_left, num_ranks - num_left, first, num_floats, right);
    for (std::int64_t i = 0; i < num_floats; ++i) {
        target[i] += right[i];
    }
}

void loraplex_channel::abort(const char *reason) {
    using namespace loraplex;
    std::uint32_t none = 0;
    if (head_->aborted.compare_exchange_strong(none, kWritingReason)) {
        std::strncpy(head_->reason, reason, sizeof(head_->reason) - 1);
        head_->aborted.store(kAborted);
    }
    for (std::int64_t rank = 0; rank < num_ranks_; ++rank) {
        wake_all(ranks_[rank].round);
    }
}

const char *loraplex_channel::abort_reason() const {
    const auto is_written = [this] { return head_->aborted.load() == loraplex::kAborted; };
    // Whoever aborts may be about to write it, or may have been killed before.
    const bool is_aborted = head_->aborted.load() != 0;
    return is_aborted && loraplex::spin_until(is_written) ? head_->reason : "";
}

int64_t loraplex_channel_bytes(int64_t num_ranks, int64_t slot_bytes) {
    using namespace loraplex;
    if (num_ranks < 1 || num_ranks > LORAPLEX_CHANNEL_MAX_RANKS || slot_bytes < 64 ||
        slot_bytes > kMaxSlotBytes || slot_bytes % 64 != 0) {
        return -1;
    }
    const auto num_lines = static_cast<std::int64_t>(sizeof(ChannelRank));
    return static_cast<std::int64_t>(sizeof(ChannelHead)) +
           num_ranks * (num_lines + 2 * slot_bytes);
}

loraplex_channel *loraplex_channel_open(int32_t fd, int64_t rank, int64_t num_ranks,
                                        int64_t slot_bytes) {
    try {
        return new loraplex_channel(fd, rank, num_ranks, slot_bytes);
    } catch (...) {
        return nullptr;
    }
}

loraplex_status loraplex_channel_close(loraplex_channel *channel) {
    delete channel;
    return LORAPLEX_OK;
}

loraplex_status loraplex_channel_gather(loraplex_channel *channel, int64_t num_bytes,
                                        const void *source, void *target) {
    return loraplex::guarded([&] {
        std::int64_t done = 0;
        do {
            const std::int64_t piece = std::min(channel->slot_bytes(), num_bytes - done);
            if (piece > 0) {
                std::memcpy(channel->begin(), static_cast<const char *>(source) + done,
                            static_cast<std::size_t>(piece));
            }
            channel->exchange(piece);
            for (std::int64_t rank = 0; rank < channel->size() && piece > 0; ++rank) {
                std::memcpy(static_cast<char *>(target) + rank * num_bytes + done,
                            channel->slot(rank), static_cast<std::size_t>(piece));
            }
            done += piece;
        } while (done < num_bytes);
        return LORAPLEX_OK;
    });
}

loraplex_status loraplex_channel_abort(loraplex_channel *channel, const char *reason) {
    channel->abort(reason);
    return LORAPLEX_OK;
}

const char *loraplex_channel_abort_reason(const loraplex_channel *channel) {
    return channel->abort_reason();
}

int64_t loraplex_channel_wait_ns(const loraplex_channel *channel) { return channel->wait_ns(); }
