// Whether this processor has the instructions, and what stands in for the kernels where it can't.
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
#else
bool available() noexcept { return false; }

void forward(const Shape&, View<const Bf16>, View<const Bf16>, View<const Bf16>, View<float>, View<float>) {
  throw std::logic_error("no AVX512-BF16");
}

void backward(const Shape&, View<const Bf16>, View<const Bf16>, View<const Bf16>, View<const Bf16>,
              View<const Bf16>, View<const float>, View<float>, View<float>, View<float>) {
  throw std::logic_error("no AVX512-BF16");
}
#endif

}  // namespace tiercache::attention
