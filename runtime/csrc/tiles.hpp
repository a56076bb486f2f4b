// Products of bf16 matrices on AVX512-BF16. One instruction multiplies pairs: both operands are cut into
// pairs of neighbours along the summed axis, a pair being 32 bits.
//
//   a  [rows][pairs]        left operand, its row's pairs side by side
//   b  [pairs][64]          right operand: a panel of 64 columns
//   c  [rows][64] fp32
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "amx.hpp"
#include "attention.hpp"

#define TC_BF16 [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]]
#define TC_BF16_INLINE TC_BF16 [[gnu::always_inline]] inline

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own undefined-vector helpers

namespace tiercache::attention {

using Pair [[gnu::may_alias]] = std::uint32_t;
constexpr std::size_t kPanel = 64;  // columns of a panel
constexpr int kTile = 6;            // rows at a time: 24 sums, 4 columns and a pair fill the 32 registers

TC_BF16_INLINE __m512 times_pair(__m512 sum, const Pair* a, __m512i b) {
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(*a))),
                          reinterpret_cast<__m512bh>(b));
}

// c (+)= a b for `Rows` rows.
template <int Rows, bool Add>
TC_BF16_INLINE void tile(const Pair* a, std::size_t a_stride, const Pair* b, std::size_t pairs, float* c,
                         std::size_t c_stride) {
  __m512 sum[Rows][4];
  for (int r = 0; r < Rows; ++r)
    for (int n = 0; n < 4; ++n)
      sum[r][n] = Add ? _mm512_loadu_ps(c + r * c_stride + 16 * n) : _mm512_setzero_ps();
  for (std::size_t p = 0; p < pairs; ++p, b += kPanel) {
    const __m512i b0 = _mm512_loadu_si512(b), b1 = _mm512_loadu_si512(b + 16);
    const __m512i b2 = _mm512_loadu_si512(b + 32), b3 = _mm512_loadu_si512(b + 48);
    for (int r = 0; r < Rows; ++r) {
      const Pair* at = a + r * a_stride + p;
      sum[r][0] = times_pair(sum[r][0], at, b0);
      sum[r][1] = times_pair(sum[r][1], at, b1);
      sum[r][2] = times_pair(sum[r][2], at, b2);
      sum[r][3] = times_pair(sum[r][3], at, b3);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int n = 0; n < 4; ++n) _mm512_storeu_ps(c + r * c_stride + 16 * n, sum[r][n]);
}

// c (+)= a b for any number of rows. With `amx` the thread holds TileRegisters and `pairs` is a multiple
// of 16.
template <bool Add>
TC_BF16 inline void product(bool amx, const Pair* a, std::size_t a_stride, std::size_t rows, const Pair* b,
                            std::size_t pairs, float* c, std::size_t c_stride) {
  if (amx)
    for (; rows >= kAmxRows; rows -= kAmxRows, a += kAmxRows * a_stride, c += kAmxRows * c_stride)
      amx_rows<Add>(a, a_stride, b, pairs, c, c_stride);
  for (; rows >= kTile; rows -= kTile, a += kTile * a_stride, c += kTile * c_stride)
    tile<kTile, Add>(a, a_stride, b, pairs, c, c_stride);
  for (; rows >= 2; rows -= 2, a += 2 * a_stride, c += 2 * c_stride)
    tile<2, Add>(a, a_stride, b, pairs, c, c_stride);
  if (rows == 1) tile<1, Add>(a, a_stride, b, pairs, c, c_stride);
}

// 2^x for x at most a little above 0, to 2e-7 relative; 0 below 2^-125, for a denormal result costs hundreds
// of cycles; NaN for NaN. Taylor series on [-1/2, 1/2].
TC_BF16_INLINE __m512 exp2_ps(__m512 x) {
  const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0F), _CMP_NLT_UQ);
  const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 f = _mm512_sub_ps(x, whole);
  __m512 y = _mm512_set1_ps(1.5403530e-4F);
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3333558e-3F));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6181291e-3F));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5504109e-2F));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022651e-1F));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314718e-1F));
  y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0F));
  return _mm512_maskz_scalef_ps(normal, y, whole);
}

TC_BF16_INLINE __m256i round16(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

// 16 pairs (low[i], high[i]).
TC_BF16_INLINE __m512i pairs16(__m512 low, __m512 high) {
  const __m512i l = _mm512_cvtepu16_epi32(round16(low)), h = _mm512_cvtepu16_epi32(round16(high));
  return _mm512_or_si512(l, _mm512_slli_epi32(h, 16));
}

}  // namespace tiercache::attention
