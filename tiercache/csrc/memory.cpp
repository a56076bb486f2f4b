#include "memory.hpp"

#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <vector>

#include "errors.hpp"

namespace tiercache {
namespace {

constexpr std::size_t kPage = 4096;

void touch(std::uint8_t* data, std::size_t size, unsigned threads) {
  if (threads == 0) return;
  const std::size_t pages = (size + kPage - 1) / kPage, share = (pages + threads - 1) / threads;
  std::vector<std::jthread> crew;
  for (unsigned t = 0; t < threads; ++t) {
    crew.emplace_back([=] {
      const std::size_t end = std::min(pages, (t + 1) * share);
      for (std::size_t page = t * share; page < end; ++page) {
        *static_cast<volatile std::uint8_t*>(data + page * kPage) = 0;
      }
    });
  }
}

bool bind_to_node(void* data, std::size_t size, int node) {
  constexpr int kMpolBind = 2;
  constexpr unsigned long kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(static_cast<unsigned long>(node) / kBits + 1, 0);
  mask.back() = 1ul << (static_cast<unsigned long>(node) % kBits);
  return syscall(SYS_mbind, data, size, kMpolBind, mask.data(), mask.size() * kBits + 1, 0) == 0;
}

// The runtime that the process has loaded, else one that the loader finds; nullptr where there is none.
void* cuda_runtime() {
  for (const char* name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}) {
    if (void* found = dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) return found;
  }
  for (const char* name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}) {
    if (void* found = dlopen(name, RTLD_LAZY)) return found;
  }
  return nullptr;
}

template <typename Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

bool register_with_cuda(void* library, void* data, std::size_t size) {
  constexpr unsigned kPortable = 1;
  const auto count = symbol<int (*)(int*)>(library, "cudaGetDeviceCount");
  const auto pin = symbol<int (*)(void*, std::size_t, unsigned)>(library, "cudaHostRegister");
  int devices = 0;
  return count && pin && count(&devices) == 0 && devices > 0 && pin(data, size, kPortable) == 0;
}

}  // namespace

Mapping::Mapping(std::size_t size, const MemoryOptions& options) : size_(size), owner_(getpid()) {
  if (size == 0) throw Error(ErrorKind::kConfig, "arena of no bytes");
  void* made =
      mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (made == MAP_FAILED) throw io_error("mmap of " + std::to_string(size) + " bytes for the arena", errno);
  data_ = static_cast<std::uint8_t*>(made);
  madvise(made, size, MADV_DONTDUMP);
  if (options.huge_pages) madvise(made, size, MADV_HUGEPAGE);
  if (options.numa_node >= 0) numa_bound_ = bind_to_node(made, size, options.numa_node);
  touch(data_, size, options.touch_threads);
  if (options.register_cuda && (cuda_ = cuda_runtime()))
    cuda_registered_ = register_with_cuda(cuda_, made, size);
}

Mapping::~Mapping() {
  if (cuda_registered_ && getpid() == owner_) {
    if (const auto unpin = symbol<int (*)(void*)>(cuda_, "cudaHostUnregister")) unpin(data_);
  }
  if (data_) munmap(data_, size_);
}

}  // namespace tiercache
