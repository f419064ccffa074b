// The rounds of a channel, for ops that add over ranks.
//
//     float *slot = channel.begin();          // write at most channel.capacity() floats there
//     channel.exchange(num_floats * sizeof(float));
//     channel.tree_sum(0, num_floats, sum);   // or read channel.slot(rank)
//
// A rank has two slots, which rounds use in turn. A rank that is in round n + 1 has read all of
// round n - 1, whose slot round n + 1 uses: so begin() never waits.
#pragma once

#include <atomic>
#include <cstdint>

#include "loraplex/channel.h"

namespace loraplex {

// One cache line of the segment, written by its rank.
struct alignas(64) ChannelRank {
    std::atomic<std::uint32_t> round;         // the last one that it published; others sleep on it
    std::atomic<std::uint32_t> num_sleeping;  // ranks that sleep on it, or are about to
    std::atomic<std::int64_t> num_bytes[2];   // of a round, by its parity
};

// The segment: this, then a ChannelRank for each rank, then two slots for each rank.
struct alignas(64) ChannelHead {
    std::atomic<std::uint32_t> aborted;
    alignas(64) char reason[LORAPLEX_CHANNEL_REASON_BYTES];
};

static_assert(std::atomic<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic<std::int64_t>::is_always_lock_free);
static_assert(sizeof(ChannelHead) == 1024 && sizeof(ChannelRank) == 64);

}  // namespace loraplex

struct loraplex_channel {
public:
    // Throws std::invalid_argument, or std::system_error if the segment cannot be mapped.
    loraplex_channel(int fd, std::int64_t rank, std::int64_t num_ranks, std::int64_t slot_bytes);
    ~loraplex_channel();
    loraplex_channel(const loraplex_channel &) = delete;
    loraplex_channel &operator=(const loraplex_channel &) = delete;

    std::int64_t rank() const { return rank_; }
    std::int64_t size() const { return num_ranks_; }
    std::int64_t slot_bytes() const { return slot_bytes_; }
    std::int64_t capacity() const { return slot_bytes_ / static_cast<std::int64_t>(sizeof(float)); }

    // This rank's slot of the coming round. Aligned to 64 bytes.
    float *begin() { return slot_of(rank_, round_ + 1); }

    // Publishes the slot and waits for all ranks. Throws Failure: LORAPLEX_ABORTED, or
    // LORAPLEX_RANKS_DIFFER if another rank published another number of bytes. Not in a tile.
    void exchange(std::int64_t num_bytes);

    // What a rank published in the round that ended; stays until the next exchange. May be read
    // from tiles.
    const float *slot(std::int64_t rank) const { return slot_of(rank, round_); }

    // Adds the slots of all ranks from float `first` on: ((r0 + r1) + (r2 + r3)), in general the
    // sum of the most ranks that are a power of two and of the rest, each added like this. target
    // may be this rank's begin(), but no slot that is read.
    void tree_sum(std::int64_t first, std::int64_t num_floats, float *target) const;

    void abort(const char *reason);
    const char *abort_reason() const;
    std::int64_t wait_ns() const { return wait_ns_.load(std::memory_order_relaxed); }

private:
    float *slot_of(std::int64_t rank, std::uint32_t round) const {
        return reinterpret_cast<float *>(slots_ + (rank * 2 + (round & 1)) * slot_bytes_);
    }
    void wait_for(loraplex::ChannelRank &other) const;
    void add_ranks(std::int64_t first_rank, std::int64_t num_ranks, std::int64_t first,
                   std::int64_t num_floats, float *target) const;

    std::int64_t rank_;
    std::int64_t num_ranks_;
    std::int64_t slot_bytes_;
    loraplex::ChannelHead *head_ = nullptr;
    loraplex::ChannelRank *ranks_ = nullptr;
    char *slots_ = nullptr;
    std::uint32_t round_ = 0;
    std::atomic<std::int64_t> wait_ns_{0};
};
