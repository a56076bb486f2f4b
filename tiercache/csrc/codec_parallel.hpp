// A loop over independent pieces of one page, by several threads that end with it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace tiercache::codec {

// Calls work(i) for i in 0..count-1 on up to `threads` threads, this one among them. The first exception
// stops the loop and is thrown here.
template <class Work>
void for_each(std::size_t count, int threads, const Work& work) {
  const std::size_t helpers = std::min(count, static_cast<std::size_t>(std::max(threads, 1)));
  if (helpers <= 1) {
    for (std::size_t i = 0; i < count; ++i) work(i);
    return;
  }
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::mutex mutex;
  const auto run = [&] {
    try {
      for (std::size_t i = next++; i < count; i = next++) work(i);
    } catch (...) {
      const std::lock_guard lock(mutex);
      if (!failure) failure = std::current_exception();
      next = count;
    }
  };
  {
    std::vector<std::jthread> team;
    for (std::size_t t = 1; t < helpers; ++t) team.emplace_back(run);
    run();
  }
  if (failure) std::rethrow_exception(failure);
}

}  // namespace tiercache::codec
