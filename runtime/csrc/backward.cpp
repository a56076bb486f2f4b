// The backward of one block. A piece of work is every second, third.. chunk of one head's keys: its dK and dV
// are its own, its part of dQ is added to the others' afterwards, in a fixed order.
//
// Scores are computed transposed, keys down and queries across: rows of the weights are then left operands of
// dK and dV, and pairs of their rows are right operands of dQ, without a transposition in the inner loop.
#if defined(__x86_64__)
#include <bit>
#include <memory>

#include "attention.hpp"
#include "pack.hpp"
#include "team.hpp"
#include "tiles.hpp"

namespace tiercache::attention {
namespace {

constexpr std::size_t kKeys = 128;     // of a chunk
constexpr std::size_t kQueries = 128;  // against it at a time: two panels
constexpr std::size_t kRows = 32;      // of scores at a time, or fewer
constexpr std::size_t kQueryPairs = kQueries / 2;
constexpr float kLog2e = 1.4426950408889634F;

// Queries and gradients of all heads, packed, with the numbers that a query's softmax needs.
struct PackedQueries {
  std::size_t per_head;                // panels of queries
  std::size_t key_panel, value_panel;  // sizes in pairs
  std::unique_ptr<std::uint32_t[]> q_columns, grad_columns, q_pairs, grad_pairs;
  std::unique_ptr<float[]> lse, delta;  // [heads][64 per_head]: lse times log2(e), and the row's grad . out

  PackedQueries(const Shape& shape, View<const Bf16> grad, View<const Bf16> q, View<const Bf16> out,
                View<const float> lse_in)
      : per_head((shape.queries + kQueries - 1) / kQueries * 2),
        key_panel(shape.key_width / 2 * kPanel),
        value_panel(shape.value_width / 2 * kPanel) {
    const std::size_t count = shape.heads * per_head;
    q_columns.reset(new std::uint32_t[count * key_panel]);
    q_pairs.reset(new std::uint32_t[count * key_panel]);
    grad_columns.reset(new std::uint32_t[count * value_panel]);
    grad_pairs.reset(new std::uint32_t[count * value_panel]);
    lse.reset(new float[count * kPanel]);
    delta.reset(new float[count * kPanel]);
    for_each(count, shape.threads, [&](std::size_t i) {
      const std::size_t head = i / per_head, first = std::min(i % per_head * kPanel, shape.queries);
      const std::size_t rows = std::min(kPanel, shape.queries - first);
      pack_as_columns(q, head, first, rows, shape.key_width, q_columns.get() + i * key_panel);
      pack_as_columns(grad, head, first, rows, shape.value_width, grad_columns.get() + i * value_panel);
      pack_row_pairs(q, head, first, rows, shape.key_width, pairs(q_pairs, key_panel, head, 0, i % per_head),
                     per_head * kPanel * 32);
      pack_row_pairs(grad, head, first, rows, shape.value_width,
                     pairs(grad_pairs, value_panel, head, 0, i % per_head), per_head * kPanel * 32);
      for (std::size_t r = 0; r < kPanel; ++r) {
        const bool real = r < rows;
        lse[i * kPanel + r] = real ? *lse_in.row(head, first + r) * kLog2e : 0;
        delta[i * kPanel + r] =
            real ? dot(grad.row(head, first + r), out.row(head, first + r), shape.value_width) : 0;
      }
    });
  }
  // Pairs of a panel of queries, in columns 64 `c`..
  std::uint32_t* pairs(const std::unique_ptr<std::uint32_t[]>& all, std::size_t panel_size, std::size_t head,
                       std::size_t c, std::size_t panel) const {
    return all.get() + head * per_head * panel_size + (c * per_head + panel) * kPanel * 32;
  }
  static float widen(Bf16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x) << 16); }
  static float dot(const Bf16* a, const Bf16* b, std::size_t count) {
    float sums[16] = {};
    for (std::size_t i = 0; i < count; i += 16)
      for (std::size_t j = 0; j < 16; ++j) sums[j] += widen(a[i + j]) * widen(b[i + j]);
    float total = 0;
    for (const float sum : sums) total += sum;
    return total;
  }
};

// Weights and their gradients of one chunk of keys against kQueries queries, in the orders of their products.
struct Weights {
  alignas(64) std::uint32_t rows[kKeys * kQueryPairs];        // weights: [key][query pair]
  alignas(64) std::uint32_t grad_rows[kKeys * kQueryPairs];   // gradients of the scores: [key][query pair]
  alignas(64) std::uint32_t grad_pairs[kKeys * kQueryPairs];  // again: [panel of queries][key pair][query]
  alignas(64) float scores[kRows * kPanel];
  alignas(64) float grads[kRows * kPanel];
};

// Rows `at`, `at` + 1 of a tile become weights. Queries from `first_query` on see key `key`, the next one
// `key` + 1.
TC_BF16 void weigh_pair(Weights& w, std::size_t at, std::size_t row, std::size_t panel, bool lone,
                        bool causal, std::size_t first_query, std::size_t key, const float* lse,
                        const float* delta, float scale) {
  const __m512 factor = _mm512_set1_ps(scale * kLog2e), scales = _mm512_set1_ps(scale);
  auto* rows = w.rows + row * kQueryPairs + panel * kPanel / 2;
  auto* grads = w.grad_rows + row * kQueryPairs + panel * kPanel / 2;
  for (std::size_t i = 0; i < kPanel; i += 16) {
    const __m512 shift = _mm512_loadu_ps(lse + i), mean = _mm512_loadu_ps(delta + i);
    __m512 grad[2];
    for (std::size_t j = 0; j < 2; ++j) {
      // queries key + j .. on are let through: the first of them is this many lanes in
      const std::size_t skipped = causal && key + j > first_query + i ? key + j - first_query - i : 0;
      auto mask = static_cast<__mmask16>(skipped >= 16 ? 0U : 0xFFFFU << skipped);
      if (j == 1 && lone) mask = 0;
      const float* scores = w.scores + (at + j) * kPanel + i;
      const __m512 x = _mm512_fmsub_ps(_mm512_loadu_ps(scores), factor, shift);
      const __m512 weight = _mm512_maskz_mov_ps(mask, exp2_ps(x));
      const __m512 d = _mm512_sub_ps(_mm512_loadu_ps(w.grads + (at + j) * kPanel + i), mean);
      grad[j] = _mm512_maskz_mul_ps(mask, _mm512_mul_ps(weight, d), scales);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(rows + j * kQueryPairs + i / 2), round16(weight));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(grads + j * kQueryPairs + i / 2), round16(grad[j]));
    }
    _mm512_storeu_si512(w.grad_pairs + (panel * kKeys / 2 + row / 2) * kPanel + i, pairs16(grad[0], grad[1]));
  }
}

const Pair* as_pairs(const Bf16* x) { return reinterpret_cast<const Pair*>(x); }

struct Work {
  const Shape& shape;
  const PackedQueries& queries;
  View<const Bf16> k, v;
  const std::uint32_t* transposed_keys;  // [kv_heads][key_width][key_pairs]
  std::size_t key_pairs;
  View<float> dk, dv;

  // Weights of keys [first, first + keys) against two panels of queries of a head, from panel `panel` on.
  TC_BF16 void weigh(Weights& w, std::size_t kv, std::size_t head, std::size_t first, std::size_t keys,
                     std::size_t panel) const {
    for (std::size_t p = 0; p < 2; ++p) {
      const std::size_t at = head * queries.per_head + panel + p;
      const std::size_t batch = shape.amx ? kRows : kTile;
      for (std::size_t row = 0; row < keys; row += batch) {
        const std::size_t rows = std::min(batch, keys - row);
        product<false>(
            shape.amx, as_pairs(k.row(kv, first + row)), static_cast<std::size_t>(k.row_stride / 2), rows,
            queries.q_columns.get() + at * queries.key_panel, shape.key_width / 2, w.scores, kPanel);
        product<false>(
            shape.amx, as_pairs(v.row(kv, first + row)), static_cast<std::size_t>(v.row_stride / 2), rows,
            queries.grad_columns.get() + at * queries.value_panel, shape.value_width / 2, w.grads, kPanel);
        for (std::size_t r = 0; r < rows; r += 2)
          weigh_pair(w, r, row + r, p, r + 1 == rows, shape.causal, (panel + p) * kPanel, first + row + r,
                     queries.lse.get() + at * kPanel, queries.delta.get() + at * kPanel, shape.scale);
      }
    }
  }

  // Adds one chunk of keys' dK and dV, and its part of dQ^T [group][panel][key_width][64], of one head.
  TC_BF16 void chunk(Weights& w, std::size_t kv, std::size_t in_group, std::size_t first, float* dq) const {
    const std::size_t keys = std::min(kKeys, shape.keys - first), head = kv * shape.group() + in_group;
    const std::size_t pairs = ((keys + 1) / 2 + kAmxPairs - 1) / kAmxPairs * kAmxPairs;
    const std::size_t begin = shape.causal ? first / kQueries * 2 : 0;
    for (std::size_t panel = begin; panel < queries.per_head; panel += 2) {
      weigh(w, kv, head, first, keys, panel);
      for (std::size_t p = 0; p < 2; ++p)  // what AMX reads beyond the last keys
        std::memset(w.grad_pairs + (p * kKeys / 2 + (keys + 1) / 2) * kPanel, 0,
                    (pairs - (keys + 1) / 2) * kPanel * sizeof *w.grad_pairs);
      for (std::size_t c = 0; c < shape.value_width / kPanel; ++c)
        product<true>(shape.amx, w.rows, kQueryPairs, keys,
                      queries.pairs(queries.grad_pairs, queries.value_panel, head, c, panel), kQueryPairs,
                      dv.row(kv, first) + c * kPanel, static_cast<std::size_t>(dv.row_stride));
      for (std::size_t c = 0; c < shape.key_width / kPanel; ++c)
        product<true>(shape.amx, w.grad_rows, kQueryPairs, keys,
                      queries.pairs(queries.q_pairs, queries.key_panel, head, c, panel), kQueryPairs,
                      dk.row(kv, first) + c * kPanel, static_cast<std::size_t>(dk.row_stride));
      for (std::size_t p = 0; p < 2; ++p)
        product<true>(shape.amx, transposed_keys + kv * shape.key_width * key_pairs + first / 2, key_pairs,
                      shape.key_width, w.grad_pairs + p * kKeys / 2 * kPanel, pairs,
                      dq + (in_group * queries.per_head + panel + p) * shape.key_width * kPanel, kPanel);
    }
  }

  // Every `parts`-th chunk of one head's keys, from chunk `part` on.
  void run(std::size_t kv, std::size_t part, std::size_t parts, float* dq) const {
    static thread_local Weights weights;
    const TileRegisters registers(shape.amx);
    std::memset(dq, 0, shape.group() * queries.per_head * shape.key_width * kPanel * sizeof *dq);
    for (std::size_t first = part * kKeys; first < shape.keys; first += parts * kKeys) {
      for (std::size_t r = first; r < std::min(first + kKeys, shape.keys); ++r) {
        std::memset(dk.row(kv, r), 0, shape.key_width * sizeof(float));
        std::memset(dv.row(kv, r), 0, shape.value_width * sizeof(float));
      }
      for (std::size_t g = 0; g < shape.group(); ++g) chunk(weights, kv, g, first, dq);
    }
  }
};

// The fewest parts of each head that share the work out evenly.
std::size_t parts_of(const Shape& shape) {
  const auto threads = static_cast<std::size_t>(std::max(shape.threads, 1));
  const std::size_t chunks = (shape.keys + kKeys - 1) / kKeys;
  std::size_t parts = 1;
  while (parts < std::min(threads, chunks) && shape.kv_heads * parts % threads != 0) ++parts;
  return parts;
}

}  // namespace

void backward(const Shape& shape, View<const Bf16> grad, View<const Bf16> q, View<const Bf16> k,
              View<const Bf16> v, View<const Bf16> out, View<const float> lse, View<float> dq, View<float> dk,
              View<float> dv) {
  const PackedQueries queries(shape, grad, q, out, lse);
  const std::size_t key_panels = panels(shape.keys), key_pairs = key_panels * kPanel / 2;
  const std::unique_ptr<std::uint32_t[]> transposed(
      new std::uint32_t[shape.kv_heads * shape.key_width * key_pairs]);
  for_each(shape.kv_heads * key_panels, shape.threads, [&](std::size_t i) {
    const std::size_t kv = i / key_panels, panel = i % key_panels, first = panel * kPanel;
    pack_transposed(k, kv, first, std::min(kPanel, shape.keys - first), shape.key_width,
                    transposed.get() + kv * shape.key_width * key_pairs + panel * kPanel / 2, key_pairs);
  });
  const Work work{shape, queries, k, v, transposed.get(), key_pairs, dk, dv};
  const std::size_t parts = parts_of(shape), head_size = queries.per_head * shape.key_width * kPanel;
  const std::size_t part_size = shape.group() * head_size;
  const std::unique_ptr<float[]> dq_parts(new float[shape.kv_heads * parts * part_size]);
  for_each(shape.kv_heads * parts, shape.threads,
           [&](std::size_t i) { work.run(i / parts, i % parts, parts, dq_parts.get() + i * part_size); });
  for_each(shape.heads * panels(shape.queries), shape.threads, [&](std::size_t i) {
    const std::size_t head = i / panels(shape.queries), panel = i % panels(shape.queries);
    const std::size_t kv = head / shape.group(), in_group = head % shape.group(), first = panel * kPanel;
    float* sum =
        dq_parts.get() + kv * parts * part_size + in_group * head_size + panel * shape.key_width * kPanel;
    for (std::size_t part = 1; part < parts; ++part)
      for (std::size_t n = 0; n < shape.key_width * kPanel; ++n) sum[n] += sum[part * part_size + n];
    for (std::size_t r = 0; r < std::min(kPanel, shape.queries - first); ++r) {
      float* row = dq.row(head, first + r);
      for (std::size_t d = 0; d < shape.key_width; ++d) row[d] = sum[d * kPanel + r];
    }
  });
}

}  // namespace tiercache::attention
#endif
