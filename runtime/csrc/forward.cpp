// The forward of one block: an online softmax over key blocks, for a few queries of one head at a time.
#if defined(__x86_64__)
#include <cmath>
#include <limits>
#include <memory>

#include "attention.hpp"
#include "pack.hpp"
#include "team.hpp"
#include "tiles.hpp"

namespace tiercache::attention {
namespace {

constexpr std::size_t kQueries =
    48;  // of one piece of work; with kKeys, scores and weights stay in the cache
constexpr std::size_t kKeys = 256;
constexpr float kLog2e = 1.4426950408889634F;
constexpr float kLn2 = 0.6931471805599453F;

// Keys and values of all heads, packed.
struct Packed {
  std::size_t panels_per_head, key_panel, value_panel;  // sizes in pairs
  std::unique_ptr<std::uint32_t[]> keys, values;

  Packed(const Shape& shape, View<const Bf16> k, View<const Bf16> v)
      : panels_per_head(panels(shape.keys)),
        key_panel(shape.key_width / 2 * kPanel),
        value_panel(shape.value_width / 2 * kPanel),
        keys(new std::uint32_t[shape.kv_heads * panels_per_head * key_panel]),
        values(new std::uint32_t[shape.kv_heads * panels_per_head * value_panel]) {
    for_each(shape.kv_heads * panels_per_head, shape.threads, [&](std::size_t i) {
      const std::size_t head = i / panels_per_head, panel = i % panels_per_head, first = panel * kPanel;
      const std::size_t rows = std::min(kPanel, shape.keys - first);
      pack_as_columns(k, head, first, rows, shape.key_width, keys.get() + i * key_panel);
      // 64 columns of all the head's rows are one panel of the product with the weights
      pack_row_pairs(v, head, first, rows, shape.value_width, value(head, 0, panel),
                     panels_per_head * kPanel * 32);
    });
  }
  const std::uint32_t* key(std::size_t head, std::size_t panel) const {
    return keys.get() + (head * panels_per_head + panel) * key_panel;
  }
  // Values of a panel of keys, in columns 64 `c`..
  std::uint32_t* value(std::size_t head, std::size_t c, std::size_t panel) const {
    return values.get() + head * panels_per_head * value_panel + (c * panels_per_head + panel) * kPanel * 32;
  }
};

// What one piece of work keeps between key blocks.
struct Softmax {
  float largest[kQueries];  // of the scores so far, times log2(e)
  float sum[kQueries];
  alignas(64) float scores[kQueries * kKeys];
  alignas(64) std::uint32_t weights[kQueries * kKeys / 2];
};

// Turns a row of `keys` scores (its last panel padded) into weights; returns the factor of earlier outputs.
TC_BF16 float weigh(Softmax& state, std::size_t row, std::size_t seen, std::size_t padded, float scale) {
  float* scores = state.scores + row * kKeys;
  __m512 most = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
  const __m512 factor = _mm512_set1_ps(scale * kLog2e), hidden = most;
  for (std::size_t i = 0; i < padded; i += 16) {
    const std::size_t left = seen > i ? seen - i : 0;
    const auto mask = static_cast<__mmask16>(left >= 16 ? 0xFFFFU : (1U << left) - 1U);
    const __m512 x = _mm512_mask_mul_ps(hidden, mask, _mm512_loadu_ps(scores + i), factor);
    _mm512_storeu_ps(scores + i, x);
    most = _mm512_max_ps(most, x);
  }
  const float before = state.largest[row];
  const float largest = std::max(before, _mm512_reduce_max_ps(most));
  const __m512 shift = _mm512_set1_ps(largest);
  __m512 total = _mm512_setzero_ps();
  auto* weights = reinterpret_cast<__m256i*>(state.weights + row * kKeys / 2);
  for (std::size_t i = 0; i < padded; i += 16) {
    const __m512 y = exp2_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + i), shift));
    total = _mm512_add_ps(total, y);
    _mm256_storeu_si256(weights + i / 16, round16(y));
  }
  const float kept = std::exp2(before - largest);
  state.largest[row] = largest;
  state.sum[row] = state.sum[row] * kept + _mm512_reduce_add_ps(total);
  return kept;
}

TC_BF16 void multiply(float* x, std::size_t count, float factor) {
  for (std::size_t i = 0; i < count; i += 16)
    _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor)));
}

// Queries [first, first + rows) of one head against all the keys they see.
TC_BF16 void attend(const Shape& shape, const Packed& packed, View<const Bf16> q, std::size_t head,
                    std::size_t first, std::size_t rows, View<float> out, View<float> lse) {
  static thread_local Softmax own;
  Softmax& state = own;  // whose address is looked up once
  const TileRegisters registers(shape.amx);
  const std::size_t kv = head / shape.group();
  const std::size_t last_key = shape.causal ? first + rows : shape.keys;
  const auto* a = reinterpret_cast<const Pair*>(q.row(head, first));
  for (std::size_t r = 0; r < rows; ++r) {
    state.largest[r] = -std::numeric_limits<float>::infinity();
    state.sum[r] = 0;
    std::memset(out.row(head, first + r), 0, shape.value_width * sizeof(float));
  }
  for (std::size_t key = 0; key < last_key; key += kKeys) {
    const std::size_t keys = std::min(kKeys, last_key - key), count = panels(keys);
    for (std::size_t p = 0; p < count; ++p)
      product<false>(shape.amx, a, static_cast<std::size_t>(q.row_stride / 2), rows,
                     packed.key(kv, key / kPanel + p), shape.key_width / 2, state.scores + p * kPanel, kKeys);
    for (std::size_t r = 0; r < rows; ++r) {
      const std::size_t visible = shape.causal ? first + r + 1 : shape.keys;
      const std::size_t seen = visible > key ? std::min(keys, visible - key) : 0;
      const float kept = weigh(state, r, seen, count * kPanel, shape.scale);
      if (kept != 1) multiply(out.row(head, first + r), shape.value_width, kept);
    }
    for (std::size_t c = 0; c < shape.value_width / kPanel; ++c)
      product<true>(shape.amx, reinterpret_cast<const Pair*>(state.weights), kKeys / 2, rows,
                    packed.value(kv, c, key / kPanel), count * kPanel / 2, out.row(head, first) + c * kPanel,
                    static_cast<std::size_t>(out.row_stride));
  }
  for (std::size_t r = 0; r < rows; ++r) {
    multiply(out.row(head, first + r), shape.value_width, 1 / state.sum[r]);
    *lse.row(head, first + r) = state.largest[r] * kLn2 + std::log(state.sum[r]);
  }
}

}  // namespace

void forward(const Shape& shape, View<const Bf16> q, View<const Bf16> k, View<const Bf16> v, View<float> out,
             View<float> lse) {
  const Packed packed(shape, k, v);
  const std::size_t pieces = (shape.queries + kQueries - 1) / kQueries;
  for_each(shape.heads * pieces, shape.threads, [&](std::size_t i) {
    const std::size_t first =
        (pieces - 1 - i % pieces) * kQueries;  // the causal ones with most keys go first
    attend(shape, packed, q, i / pieces, first, std::min(kQueries, shape.queries - first), out, lse);
  });
}

}  // namespace tiercache::attention
#endif
