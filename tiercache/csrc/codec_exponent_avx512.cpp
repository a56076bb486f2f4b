#if defined(__x86_64__)
#include "codec_avx512.hpp"
#include "codec_exponent_kernels.hpp"

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own undefined-vector helpers

namespace tiercache::codec {
namespace {

TC_TARGET void split(const std::uint16_t* x, std::size_t n, std::uint8_t* exponents, std::uint8_t* rest) {
  for (std::size_t i = 0; i < n; i += kVector) {
    const Bytes64 bytes = split64(x + i);
    _mm512_storeu_si512(exponents + i, bytes.exponents);
    _mm512_storeu_si512(rest + i, bytes.rest);
  }
}

TC_TARGET void row_sums(const std::uint8_t* exponents, std::size_t rows, std::size_t cols,
                        std::uint32_t* sums) {
  const __m512i zero = _mm512_setzero_si512();
  for (std::size_t r = 0; r < rows; ++r) {
    __m512i sum = zero;
    for (std::size_t c = 0; c < cols; c += kVector)
      sum = _mm512_add_epi64(sum, _mm512_sad_epu8(_mm512_loadu_si512(exponents + r * cols + c), zero));
    sums[r] = static_cast<std::uint32_t>(_mm512_reduce_add_epi64(sum));
  }
}

TC_TARGET void channel_sums(const std::uint8_t* exponents, std::size_t rows, std::size_t cols,
                            std::uint16_t* sums) {
  for (std::size_t c = 0; c < cols; c += kVector) {
    __m512i low = _mm512_loadu_si512(sums + c);
    __m512i high = _mm512_loadu_si512(sums + c + 32);
    for (std::size_t r = 0; r < rows; ++r) {
      const __m512i e = _mm512_loadu_si512(exponents + r * cols + c);
      low = _mm512_add_epi16(low, _mm512_cvtepu8_epi16(_mm512_castsi512_si256(e)));
      high = _mm512_add_epi16(high, _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(e, 1)));
    }
    _mm512_storeu_si512(sums + c, low);
    _mm512_storeu_si512(sums + c + 32, high);
  }
}

TC_INLINE __m512i predict(const BlockShape& shape, std::size_t row, std::size_t col) {
  const __m512i row_mean = _mm512_set1_epi8(static_cast<char>(shape.row_mean[row]));
  const __m512i both = _mm512_avg_epu8(row_mean, _mm512_loadu_si512(shape.channel_mean + col));
  const __m512i steps = _mm512_and_si512(_mm512_srli_epi16(both, 2), _mm512_set1_epi8(63));
  return _mm512_add_epi8(steps, _mm512_set1_epi8(static_cast<char>(shape.level)));
}

void sample(const std::uint8_t* exponents, const std::uint8_t* prediction, Counts& counts) {
  for (std::size_t i = 0; i < kVector; ++i) {
    const auto delta = static_cast<std::uint8_t>(exponents[i] - prediction[i]);
    ++counts[exponents[i] == 0 ? 256 : delta];
  }
}

// Appends codes of known lengths to one stream.
struct Writer {
  std::uint8_t* out;
  std::uint64_t acc = 0;
  std::uint64_t filled = 0;

  [[gnu::always_inline]] inline void put(std::uint64_t bits, std::uint64_t length) {
    acc |= bits << filled;
    filled += length;
    store(out, acc);
    out += filled >> 3;
    acc >>= filled & 56;
    filled &= 7;
  }
};

// Codes of 64 symbols: joined in eights where those fit beside the 7 waiting bits, else in fours.
TC_INLINE void append(Writer& writer, __m512i symbols, __m512i codes) {
  const __m512i mask11 = _mm512_set1_epi32(0x7FF);
  const __m512i mask4 = _mm512_set1_epi32(15);
  const __m512i first = _mm512_permutexvar_epi16(symbols, codes);  // symbols 0, 2 of every four
  const __m512i second = _mm512_permutexvar_epi16(_mm512_srli_epi16(symbols, 8), codes);  // 1, 3
  const __m512i l0 = _mm512_and_si512(_mm512_srli_epi32(first, 12), mask4);
  const __m512i l1 = _mm512_and_si512(_mm512_srli_epi32(second, 12), mask4);
  const __m512i l2 = _mm512_srli_epi32(first, 28);
  const __m512i l3 = _mm512_srli_epi32(second, 28);
  const __m512i low = _mm512_or_si512(_mm512_and_si512(first, mask11),
                                      _mm512_sllv_epi32(_mm512_and_si512(second, mask11), l0));
  const __m512i high =
      _mm512_or_si512(_mm512_and_si512(_mm512_srli_epi32(first, 16), mask11),
                      _mm512_sllv_epi32(_mm512_and_si512(_mm512_srli_epi32(second, 16), mask11), l2));
  const __m512i low_length = _mm512_add_epi32(l0, l1);
  const __m512i length = _mm512_add_epi32(low_length, _mm512_add_epi32(l2, l3));  // of fours, at most 44
  // Fours in 64-bit lanes: the even ones, then the odd ones.
  const __m512i mask32 = _mm512_set1_epi64(0xFFFFFFFF);
  const __m512i even = _mm512_or_si512(
      _mm512_and_si512(low, mask32),
      _mm512_sllv_epi64(_mm512_and_si512(high, mask32), _mm512_and_si512(low_length, mask32)));
  const __m512i odd =
      _mm512_or_si512(_mm512_srli_epi64(low, 32),
                      _mm512_sllv_epi64(_mm512_srli_epi64(high, 32), _mm512_srli_epi64(low_length, 32)));
  const __m512i even_length = _mm512_and_si512(length, mask32);
  const __m512i odd_length = _mm512_srli_epi64(length, 32);
  const __m512i eight_length = _mm512_add_epi64(even_length, odd_length);
  alignas(64) std::uint64_t bits[16];
  alignas(64) std::uint64_t lengths[16];
  if (_mm512_cmpgt_epu64_mask(eight_length, _mm512_set1_epi64(56)) == 0) [[likely]] {
    _mm512_store_si512(bits, _mm512_or_si512(even, _mm512_sllv_epi64(odd, even_length)));
    _mm512_store_si512(lengths, eight_length);
    for (int i = 0; i < 8; ++i) writer.put(bits[i], lengths[i]);
    return;
  }
  _mm512_store_si512(bits, even);
  _mm512_store_si512(bits + 8, odd);
  _mm512_store_si512(lengths, even_length);
  _mm512_store_si512(lengths + 8, odd_length);
  for (int i = 0; i < 8; ++i) {
    writer.put(bits[i], lengths[i]);
    writer.put(bits[8 + i], lengths[8 + i]);
  }
}

TC_TARGET void encode(const std::uint8_t* exponents, const BlockShape& shape, const ExponentTable& table,
                      EncodeSink& sink) {
  const std::size_t num_vectors = shape.rows * shape.cols / kVector;
  const __m512i base = _mm512_set1_epi8(static_cast<char>(table.base));
  const __m512i remap = _mm512_load_si512(table.remap.data());
  const __m512i codes = _mm512_load_si512(table.code.data());
  const __m512i escape = _mm512_set1_epi8(kEscapeSymbol);
  const __m512i zero_symbol = _mm512_set1_epi8(kZeroSymbol);
  std::size_t row = 0;
  std::size_t col = 0;
  std::uint8_t* escapes = sink.escapes;
  for (int k = 0; k < kStreams; ++k) {
    Writer writer{sink.streams[k]};
    for (std::size_t v = quarter_begin(num_vectors, k); v < quarter_begin(num_vectors, k + 1); ++v) {
      const __m512i e = _mm512_loadu_si512(exponents + v * kVector);
      const __m512i prediction = predict(shape, row, col);
      if (sink.counts != nullptr && is_sampled(v)) {
        alignas(64) std::uint8_t bytes[kVector];
        _mm512_store_si512(bytes, prediction);
        sample(exponents + v * kVector, bytes, *sink.counts);
      }
      const __m512i index = _mm512_sub_epi8(_mm512_sub_epi8(e, prediction), base);
      const __mmask64 outside = _mm512_cmpge_epu8_mask(index, zero_symbol);
      const __mmask64 zero = _mm512_testn_epi8_mask(e, e);
      const __m512i clamped =
          _mm512_mask_blend_epi8(zero, _mm512_mask_blend_epi8(outside, index, escape), zero_symbol);
      const __m512i symbols = _mm512_permutexvar_epi8(clamped, remap);
      const __mmask64 escaped = _mm512_cmpeq_epi8_mask(symbols, escape);
      if (escaped != 0) {
        _mm512_storeu_si512(escapes, _mm512_maskz_compress_epi8(escaped, e));
        escapes += _mm_popcnt_u64(escaped);
      }
      append(writer, symbols, codes);
      if ((col += kVector) == shape.cols) {
        col = 0;
        ++row;
      }
    }
    store(writer.out, writer.acc);
    sink.stream_bytes[k] = static_cast<std::size_t>(writer.out - sink.streams[k]) + (writer.filled != 0);
  }
  sink.num_escapes = static_cast<std::size_t>(escapes - sink.escapes);
}

// Exponents of one vector where some symbols are no deltas. False when the escapes run out.
TC_INLINE bool patch(__m512i symbols, __m512i& exponents, const std::uint8_t*& escapes, std::size_t& left) {
  exponents = _mm512_mask_mov_epi8(exponents, _mm512_cmpeq_epi8_mask(symbols, _mm512_set1_epi8(kZeroSymbol)),
                                   _mm512_setzero_si512());
  const __mmask64 escaped = _mm512_cmpeq_epi8_mask(symbols, _mm512_set1_epi8(kEscapeSymbol));
  const auto count = static_cast<std::size_t>(_mm_popcnt_u64(escaped));
  if (count > left) return false;
  const __mmask64 readable = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
  exponents = _mm512_mask_expand_epi8(exponents, escaped, _mm512_maskz_loadu_epi8(readable, escapes));
  escapes += count;
  left -= count;
  return true;
}

TC_TARGET bool merge(const std::uint8_t* symbols, const std::uint8_t* rest, const BlockShape& shape,
                     const ExponentTable& table, const std::uint8_t* escapes, std::size_t num_escapes,
                     std::uint16_t* x) {
  const std::size_t num_vectors = shape.rows * shape.cols / kVector;
  const __m512i base = _mm512_set1_epi8(static_cast<char>(table.base));
  const __m512i special = _mm512_set1_epi8(kDeltas);
  std::size_t row = 0;
  std::size_t col = 0;
  for (int k = 0; k < kStreams; ++k) {
    const std::uint8_t* s = symbols + static_cast<std::size_t>(k) * kQuarterStride;
    for (std::size_t v = quarter_begin(num_vectors, k); v < quarter_begin(num_vectors, k + 1); ++v) {
      const __m512i symbol = _mm512_loadu_si512(s);
      __m512i e = _mm512_add_epi8(_mm512_add_epi8(symbol, base), predict(shape, row, col));
      if (_mm512_cmpge_epu8_mask(symbol, special) != 0 && !patch(symbol, e, escapes, num_escapes))
        return false;
      merge64(e, _mm512_loadu_si512(rest + v * kVector), x + v * kVector);
      s += kVector;
      if ((col += kVector) == shape.cols) {
        col = 0;
        ++row;
      }
    }
  }
  return num_escapes == 0;
}

TC_TARGET bool decode(const StreamSource& source, const ExponentTable& table, std::size_t num_vectors,
                      std::uint8_t* symbols) {
  return kExponentAvx2.decode(source, table, num_vectors, symbols);
}

}  // namespace

const ExponentKernels kExponentAvx512 = {split, row_sums, channel_sums, encode, decode, merge};

}  // namespace tiercache::codec
#endif
