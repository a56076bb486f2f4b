// Disk::Use and deadlines, for the files that implement Disk.
#pragma once
#include <chrono>

#include "disk.hpp"
#include "errors.hpp"

namespace tiercache {

using Clock = std::chrono::steady_clock;

inline Clock::duration seconds(double value) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(value));
}

inline Clock::time_point deadline_in(double value) { return Clock::now() + seconds(value); }

// Refuses what a closed or forked store must not do, and lets close() wait for what has begun.
class Disk::Use {
 public:
  explicit Use(Disk& disk) : disk_(disk) {
    // Before the mutex: another thread may have held it at the fork, and nobody in the child would ever let
    // go.
    disk.check_process();
    const std::lock_guard lock(disk.mutex_);
    disk.check_open();
    ++disk.operations_;
  }
  ~Use() {
    const std::lock_guard lock(disk_.mutex_);
    if (--disk_.operations_ == 0 && disk_.closed_) disk_.calmed_.notify_all();
  }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  Disk& disk_;
};

}  // namespace tiercache
