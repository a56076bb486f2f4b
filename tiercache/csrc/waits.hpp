// Waits with a deadline, of a process that may be stopped meanwhile.
#pragma once
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace tiercache {

// As condition_variable::wait_until. A process that was stopped (Ctrl-Z, a paused container) wakes up behind
// its deadline, and whoever was to end the wait was stopped as well: they get a moment more.
template <typename Predicate>
bool wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                std::chrono::steady_clock::time_point deadline, Predicate done) {
  constexpr std::chrono::seconds kLate{1}, kMoment{5};
  if (changed.wait_until(lock, deadline, done)) return true;
  const bool asked_once = deadline == std::chrono::steady_clock::time_point{};
  if (asked_once || std::chrono::steady_clock::now() - deadline < kLate) return false;
  return changed.wait_for(lock, kMoment, done);
}

}  // namespace tiercache
