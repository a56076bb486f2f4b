// A loop over independent items on the threads that torch already keeps, so that neither pool waits for the
// other.
#pragma once
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>
#include <vector>

namespace tiercache::attention {

// Calls work(i) for i in 0..count-1 on up to `threads` threads. `work` must not throw.
//
// torch's OpenMP workers spin for a while after each of its own loops: threads beside them would share their
// cores. GNU OpenMP is looked up at run time, for torch may bring a copy of its own; without it, threads are
// started.
template <class Work>
void for_each(std::size_t count, int threads, const Work& work) {
  const std::size_t team = std::min(count, static_cast<std::size_t>(std::max(threads, 1)));
  if (team <= 1) {
    for (std::size_t i = 0; i < count; ++i) work(i);
    return;
  }
  struct Shared {
    const Work& work;
    std::size_t count;
    std::atomic<std::size_t> next{0};
    void run() {
      for (std::size_t i = next++; i < count; i = next++) work(i);
    }
  } shared{work, count};
  using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);
  static const auto parallel = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  if (parallel != nullptr) {
    parallel([](void* data) { static_cast<Shared*>(data)->run(); }, &shared, static_cast<unsigned>(team), 0);
    return;
  }
  std::vector<std::jthread> started;
  for (std::size_t t = 1; t < team; ++t) started.emplace_back([&] { shared.run(); });
  shared.run();
}

}  // namespace tiercache::attention
