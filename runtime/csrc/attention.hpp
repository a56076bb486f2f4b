// Attention of bf16 queries over one block of keys and values, forward with log-sum-exp and backward from it.
//
// The products run on AVX512-BF16, or AMX beside it, and sum in fp32; scores never leave fp32. A block
// without such instructions is the caller's: `available()` says so.
#pragma once
#include <cstddef>
#include <cstdint>

namespace tiercache::attention {

using Bf16 = std::uint16_t;  // its bits

// A tensor [heads, rows, width] whose rows are contiguous. Strides count elements.
template <class T>
struct View {
  T* data;
  std::ptrdiff_t head_stride;
  std::ptrdiff_t row_stride;

  T* row(std::size_t head, std::size_t row) const {
    return data + static_cast<std::ptrdiff_t>(head) * head_stride +
           static_cast<std::ptrdiff_t>(row) * row_stride;
  }
};

// Sizes of one block. Query head i reads key-value head i / (heads / kv_heads).
struct Shape {
  std::size_t heads;
  std::size_t kv_heads;
  std::size_t queries;
  std::size_t keys;
  std::size_t key_width;    // a multiple of 64
  std::size_t value_width;  // a multiple of 64
  bool causal;              // query i sees keys 0..i
  float scale;              // factor on the scores
  int threads;
  bool amx;  // products on AMX, which amx_available() must have granted

  std::size_t group() const { return heads / kv_heads; }
};

bool available() noexcept;

// Whether the processor has AMX for bf16 and the kernel lets this process use it; asks for that leave.
bool amx_available() noexcept;

// out [heads, queries, value_width], lse [heads, queries]: natural logarithms. Every query sees a key.
void forward(const Shape& shape, View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, View<float> out,
             View<float> lse);

// dq [heads, queries, key_width], dk [kv_heads, keys, key_width], dv [kv_heads, keys, value_width] are
// overwritten. `out` and `lse` are those of the whole softmax, of which the block may be a part.
void backward(const Shape& shape, View<const Bf16> grad, View<const Bf16> q, View<const Bf16> k,
              View<const Bf16> v, View<const Bf16> out, View<const float> lse, View<float> dq, View<float> dk,
              View<float> dv);

}  // namespace tiercache::attention
