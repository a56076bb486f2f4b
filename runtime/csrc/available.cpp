// Whether this processor has the instructions, and what stands in for the kernels where it can't.
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <stdexcept>

#include "attention.hpp"

namespace tiercache::attention {

#if defined(__x86_64__)
bool available() noexcept {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16");
}

bool amx_available() noexcept {
  constexpr unsigned kBf16 = 1U << 22U, kTile = 1U << 24U;     // of leaf 7, EDX
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // arch_prctl's, since Linux 5.16
  unsigned a = 0, b = 0, c = 0, d = 0;
  return available() && __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kBf16) != 0 &&
         (d & kTile) != 0 && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#else
bool available() noexcept { return false; }
bool amx_available() noexcept { return false; }

void forward(const Shape&, View<const Bf16>, View<const Bf16>, View<const Bf16>, View<float>, View<float>) {
  throw std::logic_error("no AVX512-BF16");
}

void backward(const Shape&, View<const Bf16>, View<const Bf16>, View<const Bf16>, View<const Bf16>,
              View<const Bf16>, View<const float>, View<float>, View<float>, View<float>) {
  throw std::logic_error("no AVX512-BF16");
}
#endif

}  // namespace tiercache::attention
