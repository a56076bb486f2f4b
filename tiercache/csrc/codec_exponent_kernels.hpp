// What a path of the exponent codec implements. The three paths agree bit for bit.
#pragma once
#include <cstddef>
#include <cstdint>

#include "codec_exponent.hpp"

namespace tiercache::codec {

// A block's prediction: level + (avg(row, channel) >> 2), all bytes modulo 256, in steps of an eighth of an
// exponent with 128 in the middle. Without a row or channel part that part is 128 everywhere.
struct BlockShape {
  std::size_t rows;
  std::size_t cols;
  std::uint8_t level;                // grand mean - 32
  const std::uint8_t* row_mean;      // [rows]
  const std::uint8_t* channel_mean;  // [cols]
};

// Where coded symbols and escapes of one block go. `streams[k]` has room for quarter_room() bytes.
struct EncodeSink {
  std::uint8_t* streams[kStreams];
  std::size_t stream_bytes[kStreams];
  std::uint8_t* escapes;  // room for a block and one vector
  std::size_t num_escapes;
  Counts* counts;  // or null
};

struct StreamSource {
  const std::uint8_t* streams[kStreams];
  std::size_t stream_bytes[kStreams];
};

struct ExponentKernels {
  // n (a multiple of 64) words -> exponents, and mantissa << 1 | sign.
  void (*split)(const std::uint16_t* x, std::size_t n, std::uint8_t* exponents, std::uint8_t* rest);
  // Sum of each row's bytes.
  void (*row_sums)(const std::uint8_t* exponents, std::size_t rows, std::size_t cols, std::uint32_t* sums);
  // Adds each column's bytes over all rows to `sums`.
  void (*channel_sums)(const std::uint8_t* exponents, std::size_t rows, std::size_t cols,
                       std::uint16_t* sums);
  void (*encode)(const std::uint8_t* exponents, const BlockShape& shape, const ExponentTable& table,
                 EncodeSink& sink);
  // Fills symbols: quarter k from symbols + k * quarter_stride(). False when a stream has the wrong length.
  bool (*decode)(const StreamSource& source, const ExponentTable& table, std::size_t num_vectors,
                 std::uint8_t* symbols);
  // Puts the block together. False unless exactly `num_escapes` escapes were met.
  bool (*merge)(const std::uint8_t* symbols, const std::uint8_t* rest, const BlockShape& shape,
                const ExponentTable& table, const std::uint8_t* escapes, std::size_t num_escapes,
                std::uint16_t* x);
};

extern const ExponentKernels kExponentPortable;
#if defined(__x86_64__)
extern const ExponentKernels kExponentAvx2;
extern const ExponentKernels kExponentAvx512;
#endif

// Vectors in a full quarter of a block of `num_vectors`.
constexpr std::size_t quarter_vectors(std::size_t num_vectors) {
  return (num_vectors + kStreams - 1) / kStreams;
}

// First vector of quarter k, and one past its last.
constexpr std::size_t quarter_begin(std::size_t num_vectors, int k) {
  const std::size_t at = quarter_vectors(num_vectors) * static_cast<std::size_t>(k);
  return at < num_vectors ? at : num_vectors;
}

// Bytes between quarters of symbols: a decoded look-up may store past a quarter's end.
constexpr std::size_t kQuarterStride = kBlock / kStreams + 64;
// Room of one coded quarter.
constexpr std::size_t kQuarterRoom = kBlock / kStreams * kMaxBits / 8 + 64;

// An element that is sampled for counts: every 32nd vector.
constexpr bool is_sampled(std::size_t vector) { return vector % 32 == 5; }

}  // namespace tiercache::codec
