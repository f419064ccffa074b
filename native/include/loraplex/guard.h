// Turns what a C++ function throws into the status that C callers understand.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>

#include "loraplex/abi.h"

namespace loraplex {

// A failure that has a status of its own.
class Failure : public std::exception {
public:
    explicit Failure(loraplex_status status) : status_(status) {}
    loraplex_status status() const { return status_; }
    const char *what() const noexcept override { return "loraplex"; }

private:
    loraplex_status status_;
};

// body() returns a status, or throws; std::invalid_argument is the caller's fault.
template <typename Body>
loraplex_status guarded(const Body &body) noexcept {
    try {
        return body();
    } catch (const std::bad_alloc &) {
        return LORAPLEX_OUT_OF_MEMORY;
    } catch (const std::invalid_argument &) {
        return LORAPLEX_INVALID_ARGUMENT;
    } catch (const Failure &failure) {
        return failure.status();
    } catch (...) {
        return LORAPLEX_INTERNAL;
    }
}

}  // namespace loraplex
