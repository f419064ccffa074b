#include "loraplex/pool.h"

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include <cstdlib>
#include <new>
#include <stdexcept>
#include <utility>

#include "loraplex/guard.h"
#include "spin.h"

namespace {

constexpr int kMaxThreads = 1024;
constexpr std::uint64_t kUnclaimed = 0xffffffffu;

void check_num_threads(int num_threads) {
    if (num_threads < 1 || num_threads > kMaxThreads) {
        throw std::invalid_argument("number of threads");
    }
}

}  // namespace

namespace loraplex {

Scratch::Scratch(Scratch &&other) noexcept
    : data_(std::exchange(other.data_, nullptr)), num_bytes_(std::exchange(other.num_bytes_, 0)) {}

Scratch::~Scratch() { std::free(data_); }

void *Scratch::at_least(std::size_t num_bytes) {
    if (num_bytes > num_bytes_) {
        const std::size_t rounded = (num_bytes + 63) / 64 * 64;
        void *data = std::aligned_alloc(64, rounded);
        if (data == nullptr) {
            throw std::bad_alloc();
        }
        std::free(std::exchange(data_, data));
        num_bytes_ = rounded;
    }
    return data_;
}

}  // namespace loraplex

loraplex_pool::loraplex_pool(int num_threads) {
    check_num_threads(num_threads);
    start(num_threads - 1);
}

loraplex_pool::~loraplex_pool() { stop(); }

void loraplex_pool::set_num_threads(int num_threads) {
    check_num_threads(num_threads);
    const loraplex::Op op(*this);
    if (num_threads != this->num_threads()) {
        stop();
        start(num_threads - 1);
    }
}

void loraplex_pool::limit_cpu_features(std::uint64_t features) {
    const loraplex::Op op(*this);
    cpu_features_ = features & loraplex_cpu_features();
}

void *loraplex_pool::worker_scratch(std::size_t num_bytes) {
    const auto num_workers = static_cast<std::size_t>(num_threads());
    return worker_scratch_.at_least(worker_scratch_stride(num_bytes) * num_workers);
}

void loraplex_pool::start(int num_workers) {
    stopping_ = false;
    left_core_ = -1;
    threads_.reserve(static_cast<std::size_t>(num_workers));
    try {
        for (int worker = 1; worker <= num_workers; ++worker) {
            threads_.emplace_back(&loraplex_pool::work, this, worker);
        }
    } catch (...) {
        stop();
        throw;
    }
}

void loraplex_pool::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    work_came_.notify_all();
    for (auto &thread : threads_) {
        thread.join();
    }
    threads_.clear();
}

void loraplex_pool::run(std::int64_t num_tiles, TileFunction function, const void *fn) {
    if (num_tiles > static_cast<std::int64_t>(kUnclaimed)) {
        throw std::invalid_argument("number of tiles");
    }
    if (num_tiles <= 1 || threads_.empty()) {
        for (std::int64_t tile = 0; tile < num_tiles; ++tile) {
            function(fn, tile, 0);
        }
        return;
    }
    function_ = function;
    fn_ = fn;
    num_tiles_ = static_cast<std::uint32_t>(num_tiles);
    unfinished_.store(num_tiles);
    const std::uint64_t job = (claims_.load() >> 32) + 1;
    claims_.store(job << 32 | static_cast<std::uint64_t>(num_tiles));
    if (num_sleeping_.load() > 0) {
        leave_callers_core();
        const std::lock_guard lock(mutex_);
        work_came_.notify_all();
    }
    finish_tiles(0);
    const auto all_done = [this] { return unfinished_.load() == 0; };
    if (!loraplex::spin_until(all_done)) {
        std::unique_lock lock(mutex_);
        caller_sleeps_ = true;
        work_done_.wait(lock, all_done);
        caller_sleeps_ = false;
    }
}

void loraplex_pool::leave_callers_core() {
#if defined(__linux__)
    const int core = sched_getcpu();
    cpu_set_t cores;
    if (core < 0 || core == left_core_ || sched_getaffinity(0, sizeof(cores), &cores) != 0 ||
        CPU_COUNT(&cores) < num_threads()) {
        return;
    }
    CPU_CLR(core, &cores);
    for (auto &thread : threads_) {
        pthread_setaffinity_np(thread.native_handle(), sizeof(cores), &cores);
    }
    left_core_ = core;
#endif
}

// Computes tiles of the job at hand until none is left to claim.
//
// A claim takes one of the tiles left, in the same atomic step that sees which job they belong to.
// So whoever holds a claim holds back the end of that job, and may read its function.
void loraplex_pool::finish_tiles(int worker) {
    std::uint64_t claims = claims_.load();
    while ((claims & kUnclaimed) != 0) {
        if (!claims_.compare_exchange_weak(claims, claims - 1)) {
            continue;
        }
        const auto tile = static_cast<std::int64_t>(num_tiles_ - (claims & kUnclaimed));
        function_(fn_, tile, worker);
        if (unfinished_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
            const std::lock_guard lock(mutex_);
            work_done_.notify_one();
        }
        claims = claims_.load();
    }
}

bool loraplex_pool::has_tiles() const { return (claims_.load() & kUnclaimed) != 0; }

// Spins, then sleeps; false if the pool stops.
bool loraplex_pool::wait_for_tiles() {
    const auto wake = [this] { return has_tiles() || stopping_.load(); };
    if (!loraplex::spin_until(wake)) {
        std::unique_lock lock(mutex_);
        num_sleeping_.fetch_add(1);
        work_came_.wait(lock, wake);
        num_sleeping_.fetch_sub(1);
    }
    return !stopping_.load();
}

void loraplex_pool::work(int worker) {
    while (wait_for_tiles()) {
        finish_tiles(worker);
    }
}

loraplex_status loraplex_pool_create(int32_t num_threads, loraplex_pool **pool) {
    return loraplex::guarded([&] {
        *pool = new loraplex_pool(num_threads);
        return LORAPLEX_OK;
    });
}

loraplex_status loraplex_pool_destroy(loraplex_pool *pool) {
    delete pool;
    return LORAPLEX_OK;
}

loraplex_status loraplex_pool_set_num_threads(loraplex_pool *pool, int32_t num_threads) {
    return loraplex::guarded([&] {
        pool->set_num_threads(num_threads);
        return LORAPLEX_OK;
    });
}

loraplex_status loraplex_pool_limit_cpu_features(loraplex_pool *pool, uint64_t features) {
    return loraplex::guarded([&] {
        pool->limit_cpu_features(features);
        return LORAPLEX_OK;
    });
}

int64_t loraplex_pool_num_threads(const loraplex_pool *pool) { return pool->num_threads(); }

int64_t loraplex_pool_lora_ns(const loraplex_pool *pool) { return pool->lora_ns(); }
