// The columns of all ranks, side by side.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "channel_rounds.h"
#include "loraplex/channel.h"
#include "loraplex/dtype.h"
#include "loraplex/guard.h"
#include "tiles.h"

namespace loraplex {
namespace {

template <typename T>
class Gathering {
public:
    Gathering(loraplex_channel &channel, std::int64_t total, const T *x, std::int64_t x_stride,
              T *y, std::int64_t y_stride)
        : channel_(channel), total_(total), x_(x), x_stride_(x_stride), y_(y),
          y_stride_(y_stride) {}

    void run(loraplex_pool &pool, std::int64_t num_rows) {
        // Of the rank with the most columns: all publish the same number of bytes.
        const std::int64_t most_columns = (total_ + channel_.size() - 1) / channel_.size();
        const std::int64_t row_bytes = most_columns * static_cast<std::int64_t>(sizeof(T));
        const std::int64_t most_rows = channel_.slot_bytes() / row_bytes;
        if (most_rows == 0) {
            throw std::invalid_argument("gather_columns: a slot of the channel is less than a row");
        }
        const std::int64_t own = num_columns(channel_.rank());
        for (std::int64_t first = 0; first < num_rows; first += most_rows) {
            const std::int64_t count = std::min(most_rows, num_rows - first);
            auto *slot = reinterpret_cast<T *>(channel_.begin());
            for_each_row(pool, count, own, [&](std::int64_t row) {
                copy(x_ + (first + row) * x_stride_, own, slot + row * own);
            });
            channel_.exchange(count * row_bytes);
            for_each_row(pool, count, total_, [&](std::int64_t row) { join(row, first + row); });
        }
    }

private:
    std::int64_t first_column(std::int64_t rank) const { return total_ * rank / channel_.size(); }

    std::int64_t num_columns(std::int64_t rank) const {
        return first_column(rank + 1) - first_column(rank);
    }

    // A row of the round becomes a row of y.
    void join(std::int64_t row, std::int64_t target) const {
        for (std::int64_t rank = 0; rank < channel_.size(); ++rank) {
            const std::int64_t count = num_columns(rank);
            const auto *slot = reinterpret_cast<const T *>(channel_.slot(rank));
            copy(slot + row * count, count, y_ + target * y_stride_ + first_column(rank));
        }
    }

    static void copy(const T *source, std::int64_t count, T *target) {
        std::memcpy(target, source, static_cast<std::size_t>(count) * sizeof(T));
    }

    loraplex_channel &channel_;
    std::int64_t total_;
    const T *x_;
    std::int64_t x_stride_;
    T *y_;
    std::int64_t y_stride_;
};

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_gather_columns(loraplex_pool *pool, loraplex_channel *channel,
                                        loraplex_dtype dtype, int64_t num_rows, int64_t total,
                                        const void *x, int64_t x_stride, void *y,
                                        int64_t y_stride) {
    using namespace loraplex;
    if (num_rows < 0 || total < 1) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    return guarded([&] {
        return for_dtype(dtype, [&]<typename T>(T) {
            Gathering<T>(*channel, total, static_cast<const T *>(x), x_stride,
                         static_cast<T *>(y), y_stride)
                .run(*pool, num_rows);
            return LORAPLEX_OK;
        });
    });
}
