#include "codec_exponent_block.hpp"

#include <array>
#include <cstring>
#include <memory>

#include "codec_stream.hpp"

namespace tiercache::codec {
namespace {

constexpr std::size_t kCodedHeader = 6;    // before the bits of each level
constexpr std::size_t kSampledRows = 256;  // sums of a channel fit 16 bits up to 257
// All planes and escapes that a block can have, and what a decoder may read past them.
constexpr std::size_t kPaddedRoom = kMaxLevels * kLevelBits * (kBlock / 8) + 2 * kBlock + kOverread;

// One thread's working memory, kept for its life: pages come by the thousand.
struct Scratch {
  std::uint8_t exponents[kBlock];
  std::uint8_t rest[kBlock];
  std::uint8_t planes[kMaxLevels][kLevelBits][kPlaneRoom];
  std::uint8_t escapes[kBlock + kVector];
  alignas(kVector) std::uint8_t block[stored_bytes(kBlock) + 2 * kVector];
  std::uint8_t padded[kPaddedRoom];
  std::uint8_t work[2][kBlock + 2 * kVector];
  std::uint8_t row_mean[kBlock / kVector];
  std::uint8_t channel_mean[kBlock];
  std::uint32_t row_sums[kBlock / kVector];
  std::uint16_t channel_sums[kBlock];
};

Scratch& scratch() {
  thread_local const std::unique_ptr<Scratch> mine = std::make_unique<Scratch>();
  return *mine;
}

// (sum / count - mean) in eighths around `middle`, as a byte. The rounding half is in `middle` of one part.
std::uint8_t eighths(std::uint64_t sum, std::uint64_t reciprocal, std::uint32_t mean, int middle) {
  const auto value = static_cast<std::int64_t>(sum * reciprocal >> 29) - std::int64_t{mean} * 8 + middle;
  return static_cast<std::uint8_t>(std::clamp<std::int64_t>(value, 0, 255));
}

// The parts of a block's prediction that are no means: 128 stands for none.
BlockShape neutral_shape(Scratch& s, std::size_t rows, std::size_t cols, Prediction p,
                         const std::uint8_t* means) {
  BlockShape shape{rows, cols, static_cast<std::uint8_t>(-32), s.row_mean, s.channel_mean};
  if (!has_rows(p)) std::memset(s.row_mean, 128, rows);
  if (has_channels(p)) {
    shape.level = static_cast<std::uint8_t>(means[0] - 32);
    shape.channel_mean = means + 1;
  } else {
    std::memset(s.channel_mean, 128, cols);
  }
  return shape;
}

// Means of a block whose exponents are in the scratch memory.
BlockShape predict_block(Scratch& s, std::size_t rows, std::size_t cols, Prediction p,
                         const std::uint8_t* means, const ExponentKernels& k) {
  BlockShape shape = neutral_shape(s, rows, cols, p, means);
  if (!has_rows(p)) return shape;
  k.row_sums(s.exponents, rows, cols, s.row_sums);
  std::uint64_t total = 0;
  for (std::size_t r = 0; r < rows; ++r) total += s.row_sums[r];
  const auto mean = static_cast<std::uint32_t>((total + rows * cols / 2) / (rows * cols));
  shape.level = static_cast<std::uint8_t>(mean - 32);
  const std::uint64_t per_row = (std::uint64_t{1} << 32) / cols;
  for (std::size_t r = 0; r < rows; ++r) s.row_mean[r] = eighths(s.row_sums[r], per_row, mean, 132);
  return shape;
}

// Adds the sampled exponents of a block against their predictions to `counts`. Neighbours are often equal, so
// each value has four counters, that one addition need not wait for the last.
void count_vectors(const std::uint8_t* exponents, const BlockShape& shape, Sampling sampling,
                   Counts& counts) {
  std::array<std::array<std::uint16_t, 257>, 4> parts{};
  for (std::size_t v = sampling.first; v < shape.rows * shape.cols / kVector; v += sampling.step) {
    const std::uint8_t* e = exponents + v * kVector;
    const std::uint8_t* channel = shape.channel_mean + v * kVector % shape.cols;
    const unsigned row_mean = shape.row_mean[v * kVector / shape.cols];
    std::array<std::uint16_t, kVector> index;
    for (std::size_t i = 0; i < kVector; ++i) {
      const unsigned prediction = shape.level + ((row_mean + channel[i] + 1u) >> 1 >> 2);
      const auto delta = static_cast<std::uint8_t>(e[i] - prediction);
      index[i] = e[i] == 0 ? std::uint16_t{256} : delta;
    }
    for (std::size_t i = 0; i < kVector; ++i) ++parts[i % 4][index[i]];
  }
  for (std::size_t d = 0; d < counts.size(); ++d)
    counts[d] += std::uint64_t{parts[0][d]} + parts[1][d] + parts[2][d] + parts[3][d];
}

std::size_t store_block(const std::uint16_t* x, std::size_t n, std::uint8_t* out) {
  out[0] = 0;
  hand_over(out + 1, reinterpret_cast<const std::uint8_t*>(x), 2 * n);
  return stored_bytes(n);
}

// Byte offsets of the parts of a coded block.
struct BlockLayout {
  std::size_t levels;
  std::size_t row_mean;
  std::size_t rest;
  std::size_t planes;

  BlockLayout(const ExponentTable& table, std::size_t rows, std::size_t n)
      : levels(static_cast<std::size_t>(table.num_levels)),
        row_mean(kCodedHeader + 8 * levels),
        rest(row_mean + (has_rows(table.prediction) ? rows : 0)),
        planes(rest + n) {}
};

// Calls visit(plane, bytes) for each plane in the order in which they lie in a block.
template <class Byte, class Visit>
void for_planes(const ExponentTable& table, Levels<Byte>& levels, const Visit& visit) {
  for (std::size_t l = 0; l < static_cast<std::size_t>(table.num_levels); ++l) {
    const std::size_t words = num_vectors(levels.sizes[l][0]);
    visit(levels.planes[l][0], 8 * words);
    if (has_b(table.levels[l])) visit(levels.planes[l][1], 8 * words);
    if (has_c(table.levels[l])) visit(levels.planes[l][2], (levels.sizes[l][1] + std::size_t{7}) / 8);
  }
}

std::uint8_t* append(std::uint8_t* out, const void* from, std::size_t size) {
  std::memcpy(out, from, size);
  return out + size;
}

}  // namespace

const ExponentKernels& exponent_kernels(Isa isa) {
  if (!isa_available(isa)) throw std::invalid_argument("this processor has not the instructions asked for");
#if defined(__x86_64__)
  if (isa == Isa::avx512) return kExponentAvx512;
  if (isa == Isa::avx2) return kExponentAvx2;
#endif
  return kExponentPortable;
}

void write_segment(const std::uint16_t* x, const Grid& grid, std::size_t segment, Prediction prediction,
                   const ExponentKernels& k, std::uint8_t* means) {
  Scratch& s = scratch();
  const std::size_t cols = grid.cols;
  const std::size_t begin = segment * grid.segment_blocks * grid.block_rows;
  const std::size_t end = std::min(begin + grid.segment_blocks * grid.block_rows, grid.num_rows);
  const std::size_t step = (end - begin + kSampledRows - 1) / kSampledRows;
  std::memset(s.channel_sums, 0, cols * sizeof *s.channel_sums);
  std::size_t sampled = 0;
  for (std::size_t r = begin; r < end;) {
    std::size_t batch = 0;
    for (; r < end && batch < grid.block_rows; r += step, ++batch)
      k.split(x + r * cols, cols, s.exponents + batch * cols, s.rest);
    k.channel_sums(s.exponents, batch, cols, s.channel_sums);
    sampled += batch;
  }
  std::uint64_t total = 0;
  for (std::size_t c = 0; c < cols; ++c) total += s.channel_sums[c];
  const auto mean = static_cast<std::uint32_t>((total + sampled * cols / 2) / (sampled * cols));
  means[0] = static_cast<std::uint8_t>(mean);
  const std::uint64_t per_channel = (std::uint64_t{1} << 32) / sampled;
  const int middle = has_rows(prediction) ? 128 : 132;
  for (std::size_t c = 0; c < cols; ++c) means[1 + c] = eighths(s.channel_sums[c], per_channel, mean, middle);
}

std::size_t encode_block(const std::uint16_t* x, std::size_t rows, std::size_t cols,
                         const ExponentTable& table, const std::uint8_t* means, std::uint8_t* out,
                         const ExponentKernels& k, Sampling sampling, Counts* counts) {
  Scratch& s = scratch();
  const std::size_t n = rows * cols;
  const BlockLayout at(table, rows, n);
  if (at.planes > stored_bytes(n)) return store_block(x, n, out);
  // The block is put together here, its longest part in whole lines, and then copied out at once.
  std::uint8_t* const block = s.block + kVector - at.rest % kVector;
  k.split(x, n, s.exponents, block + at.rest);
  const BlockShape shape = predict_block(s, rows, cols, table.prediction, means, k);
  if (counts != nullptr) count_vectors(s.exponents, shape, sampling, *counts);
  EncodeSink sink{{}, s.escapes, 0, {s.work[0], s.work[1]}, x + n};
  for (std::size_t l = 0; l < at.levels; ++l)
    for (std::size_t b = 0; b < kLevelBits; ++b) sink.levels.planes[l][b] = s.planes[l][b];
  k.encode(s.exponents, shape, table, sink);
  std::size_t size = at.planes + sink.num_escapes;
  for_planes(table, sink.levels, [&](const std::uint8_t*, std::size_t bytes) { size += bytes; });
  if (size >= stored_bytes(n)) return store_block(x, n, out);
  block[0] = 1;
  block[1] = static_cast<std::uint8_t>(shape.level + 32);
  store(block + 2, static_cast<std::uint32_t>(sink.num_escapes));
  for (std::size_t l = 0; l < at.levels; ++l) store(block + kCodedHeader + 8 * l, sink.levels.sizes[l]);
  append(block + at.row_mean, s.row_mean, at.rest - at.row_mean);
  std::uint8_t* to = block + at.planes;
  for_planes(table, sink.levels,
             [&](const std::uint8_t* plane, std::size_t bytes) { to = append(to, plane, bytes); });
  append(to, s.escapes, sink.num_escapes);
  hand_over(out, block, size);
  return size;
}

void decode_block(const std::uint8_t* block, std::size_t size, std::size_t readable, std::uint16_t* x,
                  std::size_t rows, std::size_t cols, const ExponentTable& table, const std::uint8_t* means,
                  const ExponentKernels& k, bool stream) {
  const std::size_t n = rows * cols;
  if (size == 0) throw Malformed("exponent payload: an empty block");
  if (block[0] == 0) {
    if (size != stored_bytes(n)) throw Malformed("exponent payload: a stored block of the wrong size");
    std::memcpy(x, block + 1, 2 * n);
    return;
  }
  Scratch& s = scratch();
  const BlockLayout at(table, rows, n);
  if (block[0] != 1 || size < at.planes) throw Malformed("exponent payload: an unknown block");
  DecodeSource source{block + at.rest,        {},    nullptr, load<std::uint32_t>(block + 2),
                      {s.work[0], s.work[1]}, stream};
  std::size_t coded = source.num_escapes;
  std::uint32_t most = load<std::uint32_t>(block + 2);
  for (std::size_t l = 0; l < at.levels; ++l) {
    auto& sizes = source.levels.sizes[l];
    sizes = load<std::array<std::uint32_t, 2>>(block + kCodedHeader + 8 * l);
    most = std::max({most, sizes[0], sizes[1]});
  }
  if (most > n || source.levels.sizes[0][0] != n)
    throw Malformed("exponent payload: a block's parts don't fit its elements");
  for_planes(table, source.levels, [&](const std::uint8_t*, std::size_t bytes) { coded += bytes; });
  if (at.planes + coded != size)
    throw Malformed("exponent payload: a block's parts don't add up to its size");
  const std::uint8_t* from = block + at.planes;
  if (readable < size + n + kOverread) {  // a damaged plane could lead a decoder past the page's end
    std::memcpy(s.padded, from, coded);
    from = s.padded;
  }
  for_planes(table, source.levels, [&](const std::uint8_t*& plane, std::size_t bytes) {
    plane = from;
    from += bytes;
  });
  source.escapes = from;
  BlockShape shape = neutral_shape(s, rows, cols, table.prediction, means);
  shape.level = static_cast<std::uint8_t>(block[1] - 32);
  if (has_rows(table.prediction)) shape.row_mean = block + at.row_mean;
  if (!k.decode(source, shape, table, x)) throw Malformed("exponent payload: a damaged block");
}

void count_block(const std::uint16_t* x, std::size_t rows, std::size_t cols, Prediction prediction,
                 const std::uint8_t* means, const ExponentKernels& k, Sampling sampling, Counts& counts) {
  Scratch& s = scratch();
  k.split(x, rows * cols, s.exponents, s.rest);
  count_vectors(s.exponents, predict_block(s, rows, cols, prediction, means, k), sampling, counts);
}

}  // namespace tiercache::codec
