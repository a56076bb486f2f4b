// One private anonymous mapping of exact size, and how much memory this process may still take.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

namespace tiercache {

struct MemoryOptions {
  bool huge_pages = false;     // MADV_HUGEPAGE: a hint, ignored where the kernel has none
  int numa_node = -1;          // bind to this node before the first touch; -1 leaves the default policy
  unsigned touch_threads = 2;  // threads that touch every page once; 0 leaves pages to the first use
  bool register_cuda = false;  // page-lock with the CUDA runtime that is loaded or can be loaded
};

// Zeroed memory that is kept out of core dumps and unmapped at the end.
class Mapping {
 public:
  Mapping(std::size_t size, const MemoryOptions& options);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::uint8_t* data() const noexcept { return data_; }
  std::size_t size() const noexcept { return size_; }
  bool cuda_registered() const noexcept { return cuda_registered_; }
  bool numa_bound() const noexcept { return numa_bound_; }

 private:
  std::uint8_t* data_ = nullptr;
  std::size_t size_ = 0;
  bool cuda_registered_ = false;
  bool numa_bound_ = false;
  void* cuda_ = nullptr;  // handle of the runtime library
  int owner_ = 0;         // pid: a forked child must not unregister
};

// Smallest of (limit - usage) over this process's memory cgroup and every ancestor, v1 and v2, and of
// MemAvailable. `root` is "/" but in tests, which lay out /proc and /sys/fs/cgroup below another folder.
std::uint64_t available_memory(const std::string& root = "/");

}  // namespace tiercache
