#if defined(__x86_64__)
#include <type_traits>
#include <utility>

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

TC_INLINE std::uint64_t with(__m512i codes, int bit) {
  return _mm512_test_epi8_mask(codes, _mm512_set1_epi8(static_cast<char>(bit)));
}

// Writes the level of one vector of symbols; returns those that go on.
struct LevelWriter {
  std::uint8_t* a;
  std::uint8_t* b;
  PlaneWriter c;
  std::uint64_t num_thirds = 0;
  unsigned num_ranks;
  __m512i codes;

  TC_INLINE LevelWriter(std::size_t level, const ExponentTable& table, Levels<std::uint8_t>& out)
      : a(out.planes[level][0]),
        b(out.planes[level][1]),
        c{out.planes[level][2]},
        num_ranks(table.levels[level]),
        codes(_mm512_load_si512(table.code_of[level].data())) {}

  TC_INLINE std::uint64_t write(__m512i symbols, std::uint64_t valid) {
    const __m512i code = _mm512_permutexvar_epi8(symbols, codes);
    store(a, with(code, kA) & valid);
    a += 8;
    if (has_b(num_ranks)) {
      store(b, with(code, kB) & valid);
      b += 8;
    }
    if (has_c(num_ranks)) {
      const std::uint64_t third = with(code, kThird) & valid;
      const auto count = static_cast<unsigned>(_mm_popcnt_u64(third));
      c.put(num_thirds, _pext_u64(with(code, kC), third), count);
      num_thirds += count;
    }
    return with(code, kGoesOn) & valid;
  }
};

// Appends the chosen bytes of a vector.
TC_INLINE void append(std::uint8_t*& to, std::uint64_t chosen, __m512i bytes) {
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi8(chosen, bytes));
  to += _mm_popcnt_u64(chosen);
}

TC_TARGET std::size_t encode_level(const std::uint8_t* symbols, std::size_t size, std::size_t level,
                                   const ExponentTable& table, Levels<std::uint8_t>& out,
                                   std::uint8_t* next) {
  LevelWriter writer(level, table, out);
  std::uint8_t* to = next;
  for (std::size_t v = 0; v < num_vectors(size); ++v) {
    const __m512i some = _mm512_loadu_si512(symbols + v * kVector);
    append(to, writer.write(some, first_elements(size - v * kVector)), some);
  }
  out.sizes[level] = {static_cast<std::uint32_t>(size), static_cast<std::uint32_t>(writer.num_thirds)};
  return static_cast<std::size_t>(to - next);
}

// Asks for the part of the next block that belongs to vector v.
TC_INLINE void ask_ahead(const EncodeSink& sink, std::size_t v) {
  constexpr int kForReading = 0, kSecondLevel = 2;
  __builtin_prefetch(sink.next + v * kVector, kForReading, kSecondLevel);
  __builtin_prefetch(sink.next + v * kVector + kVector / 2, kForReading, kSecondLevel);
}

// The first level is written as its symbols are found, and so are the escapes.
TC_TARGET void encode(const std::uint8_t* exponents, const BlockShape& shape, const ExponentTable& table,
                      EncodeSink& sink) {
  const std::size_t n = shape.rows * shape.cols;
  const __m512i base = _mm512_set1_epi8(static_cast<char>(table.base));
  const __m512i escaping = _mm512_maskz_loadu_epi8((__mmask64{1} << kSymbols) - 1, table.is_escape.data());
  LevelWriter writer(0, table, sink.levels);
  std::size_t row = 0;
  std::size_t col = 0;
  std::uint8_t* escapes = sink.escapes;
  std::uint8_t* symbols = sink.work[0];
  std::uint8_t* next = sink.work[1];
  std::uint8_t* to = symbols;
  for (std::size_t v = 0; v < n / kVector; ++v) {
    ask_ahead(sink, v);
    const __m512i e = _mm512_loadu_si512(exponents + v * kVector);
    __m512i some = _mm512_sub_epi8(_mm512_sub_epi8(e, predict(shape, row, col)), base);
    some = _mm512_mask_mov_epi8(some, _mm512_cmpge_epu8_mask(some, _mm512_set1_epi8(kDeltas)),
                                _mm512_set1_epi8(kEscapeSymbol));
    some = _mm512_mask_mov_epi8(some, _mm512_testn_epi8_mask(e, e), _mm512_set1_epi8(kZeroSymbol));
    append(to, writer.write(some, ~std::uint64_t{0}), some);
    append(escapes, with(_mm512_permutexvar_epi8(some, escaping), 1), e);
    if ((col += kVector) == shape.cols) {
      col = 0;
      ++row;
    }
  }
  sink.levels.sizes[0] = {static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(writer.num_thirds)};
  sink.num_escapes = static_cast<std::size_t>(escapes - sink.escapes);
  auto size = static_cast<std::size_t>(to - symbols);
  for (std::size_t level = 1; level < static_cast<std::size_t>(table.num_levels); ++level) {
    size = encode_level(symbols, size, level, table, sink.levels, next);
    std::swap(symbols, next);
  }
}

TC_INLINE __m512i add_where(__m512i ranks, std::uint64_t where, int weight) {
  return _mm512_mask_add_epi8(ranks, where, ranks, _mm512_set1_epi8(static_cast<char>(weight)));
}

// Reads one level vector by vector, into ranks above its first one.
template <unsigned kRanks>
struct LevelReader {
  const std::uint8_t* a;
  const std::uint8_t* b;
  const std::uint8_t* c;
  const std::uint8_t* below;  // ranks of the elements that go on
  std::uint64_t num_thirds = 0;

  TC_INLINE LevelReader(const Levels<const std::uint8_t>& in, std::size_t level, const std::uint8_t* below_)
      : a(in.planes[level][0]), b(in.planes[level][1]), c(in.planes[level][2]), below(below_) {}

  TC_INLINE __m512i read(std::size_t v, std::uint64_t valid) {
    const std::uint64_t bit_a = load<std::uint64_t>(a + 8 * v) & valid;
    std::uint64_t on = bit_a;
    __m512i ranks = _mm512_maskz_set1_epi8(bit_a, kRanks == 1 ? 1 : kRanks == 6 ? 3 : kRanks == 7 ? 4 : 2);
    if constexpr (has_b(kRanks)) {
      const std::uint64_t bit_b = load<std::uint64_t>(b + 8 * v) & valid;
      ranks = add_where(ranks, bit_b, kRanks == 7 ? 2 : 1);
      on &= bit_b;
      if constexpr (has_c(kRanks)) {
        // Twice a b, less the number of short codes, plus c; as it is where there is no c.
        if constexpr (kRanks != 7) ranks = add_where(ranks, on, 1);
        const std::uint64_t third = kRanks == 5 ? bit_a : kRanks == 6 ? bit_a | bit_b : valid;
        const auto count = static_cast<unsigned>(_mm_popcnt_u64(third));
        const std::uint64_t bit_c = _pdep_u64(take_bits(c, num_thirds, count), third);
        num_thirds += count;
        ranks = add_where(ranks, bit_c, 1);
        on &= bit_c;
      }
    }
    const __m512i more = _mm512_maskz_expand_epi8(on, _mm512_loadu_si512(below));
    below += _mm_popcnt_u64(on);
    return _mm512_add_epi8(ranks, more);
  }
};

template <unsigned kRanks>
TC_TARGET bool decode_level(const Levels<const std::uint8_t>& in, std::size_t level,
                            const std::uint8_t* below, std::size_t num_below, std::uint8_t* ranks) {
  const auto [size, c_bits] = in.sizes[level];
  LevelReader<kRanks> reader(in, level, below);
  for (std::size_t v = 0; v < num_vectors(size); ++v)
    _mm512_storeu_si512(ranks + v * kVector, reader.read(v, first_elements(size - v * kVector)));
  return reader.below == below + num_below && reader.num_thirds == c_bits;
}

// The first level is put together with the rest as it is read.
template <unsigned kRanks>
TC_TARGET bool decode_first(const DecodeSource& source, const BlockShape& shape, const ExponentTable& table,
                            const std::uint8_t* below, std::size_t num_below, std::uint16_t* x) {
  const std::size_t n = shape.rows * shape.cols;
  const __m512i delta_of = _mm512_load_si512(table.delta_of.data());
  const __m512i zero_rank = _mm512_set1_epi8(static_cast<char>(table.zero_rank));
  const __m512i escape_rank = _mm512_set1_epi8(static_cast<char>(table.escape_rank));
  LevelReader<kRanks> reader(source.levels, 0, below);
  const std::uint8_t* escapes = source.escapes;
  std::size_t row = 0;
  std::size_t col = 0;
  for (std::size_t v = 0; v < n / kVector; ++v) {
    const __m512i ranks = reader.read(v, ~std::uint64_t{0});
    __m512i e = _mm512_add_epi8(_mm512_permutexvar_epi8(ranks, delta_of), predict(shape, row, col));
    e = _mm512_mask_mov_epi8(e, _mm512_cmpeq_epi8_mask(ranks, zero_rank), _mm512_setzero_si512());
    const std::uint64_t escaped = _mm512_cmpeq_epi8_mask(ranks, escape_rank);
    e = _mm512_mask_expand_epi8(e, escaped, _mm512_loadu_si512(escapes));
    escapes += _mm_popcnt_u64(escaped);
    merge64(e, _mm512_loadu_si512(source.rest + v * kVector), x + v * kVector, source.stream);
    if ((col += kVector) == shape.cols) {
      col = 0;
      ++row;
    }
  }
  return reader.below == below + num_below && reader.num_thirds == source.levels.sizes[0][1] &&
         escapes == source.escapes + source.num_escapes;
}

// work(std::integral_constant<unsigned, ranks>) for the ranks that a level has.
template <class Work_>
TC_INLINE bool of_ranks(unsigned ranks, const Work_& work) {
  switch (ranks) {
    case 1:
      return work(std::integral_constant<unsigned, 1>{});
    case 3:
      return work(std::integral_constant<unsigned, 3>{});
    case 5:
      return work(std::integral_constant<unsigned, 5>{});
    case 6:
      return work(std::integral_constant<unsigned, 6>{});
    default:
      return work(std::integral_constant<unsigned, 7>{});
  }
}

TC_TARGET bool decode(const DecodeSource& source, const BlockShape& shape, const ExponentTable& table,
                      std::uint16_t* x) {
  std::uint8_t* ranks = source.work[0];
  std::uint8_t* below = source.work[1];
  bool good = true;
  std::size_t size = source.num_escapes;
  std::memset(ranks, 0, size + kVector);  // escapes are the rank after the last
  for (auto level = static_cast<std::size_t>(table.num_levels) - 1; level > 0; --level) {
    std::swap(ranks, below);
    good = of_ranks(table.levels[level],
                    [&](auto num_ranks) {
                      return decode_level<num_ranks()>(source.levels, level, below, size, ranks);
                    }) &&
           good;
    size = source.levels.sizes[level][0];
  }
  return of_ranks(table.levels[0],
                  [&](auto num_ranks) {
                    return decode_first<num_ranks()>(source, shape, table, ranks, size, x);
                  }) &&
         good;
}

}  // namespace

const ExponentKernels kExponentAvx512 = {split, row_sums, channel_sums, encode, decode};

}  // namespace tiercache::codec
#endif
