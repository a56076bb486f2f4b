// The bindings of the attention kernels, and nothing else. Tensors come as addresses and strides: bf16 has no
// name in the array protocols. The caller, runtime/native_attention.py, has checked them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include <tuple>

#include "attention.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tiercache::attention;

namespace {

using Address = std::tuple<std::uintptr_t, std::ptrdiff_t, std::ptrdiff_t>;  // data, head stride, row stride

template <class T>
View<T> view(const Address& address) {
  return {reinterpret_cast<T*>(std::get<0>(address)), std::get<1>(address), std::get<2>(address)};
}

using Sizes = std::tuple<std::size_t, std::size_t, std::size_t, std::size_t, std::size_t, std::size_t>;

Shape shape_of(const Sizes& sizes, bool causal, float scale, int threads, bool amx) {
  const auto [heads, kv_heads, queries, keys, key_width, value_width] = sizes;
  return {heads, kv_heads, queries, keys, key_width, value_width, causal, scale, threads, amx};
}

}  // namespace

NB_MODULE(_attention, m) {
  m.doc() =
      "Attention of bf16 tensors in main memory, on AVX512-BF16. A tensor [heads, rows, width] is (address, "
      "head "
      "stride, row stride) with strides in elements; sizes are (heads, kv_heads, queries, keys, key_width, "
      "value_width).";
  m.def("available", &available, "Whether this processor has the instructions.");
  m.def("amx_available", &amx_available,
        "Whether it has AMX for bf16, and the kernel grants it to this process.");
  m.def(
      "forward",
      [](const Sizes& sizes, bool causal, float scale, int threads, bool amx, const Address& q,
         const Address& k, const Address& v, const Address& out, const Address& lse) {
        forward(shape_of(sizes, causal, scale, threads, amx), view<const Bf16>(q), view<const Bf16>(k),
                view<const Bf16>(v), view<float>(out), view<float>(lse));
      },
      "sizes"_a, "causal"_a, "scale"_a, "threads"_a, "amx"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a,
      nb::call_guard<nb::gil_scoped_release>(), "Writes fp32 `out` and `lse`; the rest is bf16.");
  m.def(
      "backward",
      [](const Sizes& sizes, bool causal, float scale, int threads, bool amx, const Address& grad,
         const Address& q, const Address& k, const Address& v, const Address& out, const Address& lse,
         const Address& dq, const Address& dk, const Address& dv) {
        backward(shape_of(sizes, causal, scale, threads, amx), view<const Bf16>(grad), view<const Bf16>(q),
                 view<const Bf16>(k), view<const Bf16>(v), view<const Bf16>(out), view<const float>(lse),
                 view<float>(dq), view<float>(dk), view<float>(dv));
      },
      "sizes"_a, "causal"_a, "scale"_a, "threads"_a, "amx"_a, "grad"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a,
      "dq"_a, "dk"_a, "dv"_a, nb::call_guard<nb::gil_scoped_release>(),
      "Writes fp32 `dq`, `dk` and `dv` from fp32 `lse` and bf16 else.");
}
