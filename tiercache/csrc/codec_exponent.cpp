#include "codec_exponent.hpp"

#include <algorithm>
#include <limits>
#include <memory>
#include <vector>

#include "codec_exponent_kernels.hpp"
#include "codec_parallel.hpp"

namespace tiercache::codec {
namespace {

// One thread's working memory, kept for its life: pages come by the thousand.
struct Scratch {
  std::uint8_t exponents[kBlock];
  std::uint8_t streams[kStreams][kQuarterRoom];
  std::uint8_t escapes[kBlock + kVector];
  std::uint8_t symbols[kStreams * kQuarterStride];
  std::uint8_t row_mean[kBlock / kVector];
  std::uint8_t channel_mean[kBlock];
  std::uint32_t row_sums[kBlock / kVector];
  std::uint16_t channel_sums[kBlock];
};

Scratch& scratch() {
  thread_local const std::unique_ptr<Scratch> mine = std::make_unique<Scratch>();
  return *mine;
}

const ExponentKernels& kernels(Isa isa) {
  if (!isa_available(isa)) throw std::invalid_argument("this processor has not the instructions asked for");
#if defined(__x86_64__)
  if (isa == Isa::avx512) return kExponentAvx512;
  if (isa == Isa::avx2) return kExponentAvx2;
#endif
  return kExponentPortable;
}

bool has_rows(Prediction p) { return (static_cast<int>(p) & 1) != 0; }
bool has_channels(Prediction p) { return (static_cast<int>(p) & 2) != 0; }

struct Grid {
  std::size_t cols;
  std::size_t block_rows;
  std::size_t num_rows;
  std::size_t num_blocks;
  std::size_t tail;  // elements that fill no row

  Grid(std::size_t n, std::size_t cols_) : cols(cols_) {
    if (cols == 0 || cols % kVector != 0 || cols > kBlock) throw std::invalid_argument("columns of a block");
    block_rows = kBlock / cols;
    num_rows = n / cols;
    num_blocks = (num_rows + block_rows - 1) / block_rows;
    tail = n - num_rows * cols;
  }
  [[nodiscard]] std::size_t rows(std::size_t block) const {
    return std::min(block_rows, num_rows - block * block_rows);
  }
  [[nodiscard]] std::size_t begin(std::size_t block) const { return block * block_rows * cols; }
};

std::size_t stored_bytes(std::size_t n) { return 1 + 2 * n; }

// (sum / count - mean) in eighths around `middle`, as a byte.
std::uint8_t eighths(std::uint64_t sum, std::uint64_t reciprocal, std::uint32_t mean, int middle) {
  const auto value = static_cast<std::int64_t>(sum * reciprocal >> 29) - std::int64_t{mean} * 8 + middle;
  return static_cast<std::uint8_t>(std::clamp<std::int64_t>(value, 0, 255));
}

// Means of a block whose exponents are in the scratch memory. The rounding half is in one part only.
BlockShape predict_block(Scratch& s, std::size_t rows, std::size_t cols, Prediction prediction,
                         const ExponentKernels& k) {
  BlockShape shape{rows, cols, static_cast<std::uint8_t>(-32), s.row_mean, s.channel_mean};
  if (!has_rows(prediction)) std::memset(s.row_mean, 128, rows);
  if (!has_channels(prediction)) std::memset(s.channel_mean, 128, cols);
  if (prediction == Prediction::none) return shape;
  const std::size_t step = (rows + 255) / 256;
  const std::size_t sampled = (rows + step - 1) / step;
  std::uint64_t total = 0;
  std::uint64_t count = rows * cols;
  if (has_rows(prediction)) {
    k.row_sums(s.exponents, rows, cols, s.row_sums);
    for (std::size_t r = 0; r < rows; ++r) total += s.row_sums[r];
  }
  if (has_channels(prediction)) {
    k.channel_sums(s.exponents, rows, cols, step, s.channel_sums);
    if (!has_rows(prediction)) {
      count = sampled * cols;
      for (std::size_t c = 0; c < cols; ++c) total += s.channel_sums[c];
    }
  }
  const auto mean = static_cast<std::uint32_t>((total + count / 2) / count);
  shape.level = static_cast<std::uint8_t>(mean - 32);
  const std::uint64_t per_row = (std::uint64_t{1} << 32) / cols;
  const std::uint64_t per_channel = (std::uint64_t{1} << 32) / sampled;
  if (has_rows(prediction))
    for (std::size_t r = 0; r < rows; ++r) s.row_mean[r] = eighths(s.row_sums[r], per_row, mean, 132);
  if (has_channels(prediction)) {
    const int middle = has_rows(prediction) ? 128 : 132;
    for (std::size_t c = 0; c < cols; ++c)
      s.channel_mean[c] = eighths(s.channel_sums[c], per_channel, mean, middle);
  }
  return shape;
}

std::size_t store_block(const std::uint16_t* x, std::size_t n, std::uint8_t* out) {
  out[0] = 0;
  std::memcpy(out + 1, x, 2 * n);
  return stored_bytes(n);
}

std::uint8_t* append(std::uint8_t* out, const void* from, std::size_t size) {
  std::memcpy(out, from, size);
  return out + size;
}

// Writes one block, at most stored_bytes(rows * cols); returns its size.
std::size_t encode_block(const std::uint16_t* x, std::size_t rows, std::size_t cols,
                         const ExponentTable& table, std::uint8_t* out, const ExponentKernels& k,
                         Counts* counts) {
  Scratch& s = scratch();
  const std::size_t n = rows * cols;
  const Prediction p = table.prediction;
  std::uint8_t* const means = out + kCodedHeader;
  std::uint8_t* const rest = means + (has_rows(p) ? rows : 0) + (has_channels(p) ? cols : 0);
  if (rest + n > out + stored_bytes(n)) return store_block(x, n, out);
  k.split(x, n, s.exponents, rest);
  const BlockShape shape = predict_block(s, rows, cols, p, k);
  EncodeSink sink{{s.streams[0], s.streams[1], s.streams[2], s.streams[3]}, {}, s.escapes, 0, counts};
  k.encode(s.exponents, shape, table, sink);
  std::size_t size = static_cast<std::size_t>(rest - out) + n + sink.num_escapes;
  for (const std::size_t bytes : sink.stream_bytes) size += bytes;
  if (size >= stored_bytes(n)) return store_block(x, n, out);
  out[0] = 1;
  out[1] = static_cast<std::uint8_t>(shape.level + 32);
  store(out + 2, static_cast<std::uint32_t>(sink.num_escapes));
  for (int i = 0; i < kStreams; ++i) store(out + 6 + 4 * i, static_cast<std::uint32_t>(sink.stream_bytes[i]));
  std::uint8_t* at = means;
  if (has_rows(p)) at = append(at, s.row_mean, rows);
  if (has_channels(p)) append(at, s.channel_mean, cols);
  at = rest + n;
  for (int i = 0; i < kStreams; ++i) at = append(at, sink.streams[i], sink.stream_bytes[i]);
  append(at, s.escapes, sink.num_escapes);
  return size;
}

void decode_block(const std::uint8_t* block, std::size_t size, std::uint16_t* x, std::size_t rows,
                  std::size_t cols, const ExponentTable& table, const ExponentKernels& k) {
  const std::size_t n = rows * cols;
  if (size == 0) throw Malformed("exponent payload: an empty block");
  if (block[0] == 0) {
    if (size != stored_bytes(n)) throw Malformed("exponent payload: a stored block of the wrong size");
    std::memcpy(x, block + 1, 2 * n);
    return;
  }
  if (block[0] != 1 || size < kCodedHeader) throw Malformed("exponent payload: an unknown block");
  Scratch& s = scratch();
  const Prediction p = table.prediction;
  const std::size_t num_escapes = load<std::uint32_t>(block + 2);
  StreamSource source{};
  std::uint64_t need = kCodedHeader + (has_rows(p) ? rows : 0) + (has_channels(p) ? cols : 0);
  const std::uint8_t* const rest = block + need;
  need += n;
  for (int i = 0; i < kStreams; ++i) {
    source.streams[i] = block + need;
    source.stream_bytes[i] = load<std::uint32_t>(block + 6 + 4 * i);
    need += source.stream_bytes[i];
  }
  if (need + num_escapes != size)
    throw Malformed("exponent payload: a block's parts don't add up to its size");
  const std::uint8_t* at = block + kCodedHeader;
  BlockShape shape{rows, cols, static_cast<std::uint8_t>(block[1] - 32), s.row_mean, s.channel_mean};
  if (has_rows(p)) {
    shape.row_mean = at;
    at += rows;
  } else {
    std::memset(s.row_mean, 128, rows);
  }
  if (has_channels(p))
    shape.channel_mean = at;
  else
    std::memset(s.channel_mean, 128, cols);
  if (!k.decode(source, table, n / kVector, s.symbols)) throw Malformed("exponent payload: a damaged stream");
  if (!k.merge(s.symbols, rest, shape, table, block + need, num_escapes, x))
    throw Malformed("exponent payload: the escapes don't match the symbols");
}

}  // namespace

std::size_t exponent_bound(std::size_t n, std::size_t cols) {
  const Grid grid(n, cols);
  return 5 * grid.num_blocks + 2 * n;
}

std::size_t exponent_encode(const std::uint16_t* x, std::size_t n, std::size_t cols,
                            const ExponentTable& table, std::uint8_t* out, Isa isa, int threads,
                            Counts* counts) {
  const Grid grid(n, cols);
  const ExponentKernels& k = kernels(isa);
  std::uint8_t* at = out + 4 * grid.num_blocks;
  if (threads <= 1 || grid.num_blocks <= 1) {
    for (std::size_t b = 0; b < grid.num_blocks; ++b) {
      const std::size_t size = encode_block(x + grid.begin(b), grid.rows(b), cols, table, at, k, counts);
      store(out + 4 * b, static_cast<std::uint32_t>(size));
      at += size;
    }
  } else {
    // Each block is written where it would lie if all before it were stored, then they are moved together.
    const auto place = [&](std::size_t b) { return out + 4 * grid.num_blocks + b + 2 * grid.begin(b); };
    std::vector<Counts> shares(counts != nullptr ? grid.num_blocks : 0);
    for_each(grid.num_blocks, threads, [&](std::size_t b) {
      Counts* share = counts != nullptr ? &shares[b] : nullptr;
      const std::size_t size = encode_block(x + grid.begin(b), grid.rows(b), cols, table, place(b), k, share);
      store(out + 4 * b, static_cast<std::uint32_t>(size));
    });
    for (std::size_t b = 0; b < grid.num_blocks; ++b) {
      const std::size_t size = load<std::uint32_t>(out + 4 * b);
      std::memmove(at, place(b), size);
      at += size;
    }
    for (const Counts& share : shares)
      for (std::size_t d = 0; d < share.size(); ++d) (*counts)[d] += share[d];
  }
  std::memcpy(at, x + n - grid.tail, 2 * grid.tail);
  return static_cast<std::size_t>(at - out) + 2 * grid.tail;
}

void exponent_decode(const std::uint8_t* body, std::size_t size, std::uint16_t* x, std::size_t n,
                     std::size_t cols, const ExponentTable& table, Isa isa, int threads) {
  const Grid grid(n, cols);
  const ExponentKernels& k = kernels(isa);
  if (size < 4 * grid.num_blocks + 2 * grid.tail)
    throw Malformed("exponent payload: too short for its directory");
  std::vector<std::size_t> offsets(grid.num_blocks + 1, 4 * grid.num_blocks);
  for (std::size_t b = 0; b < grid.num_blocks; ++b)
    offsets[b + 1] = offsets[b] + load<std::uint32_t>(body + 4 * b);
  if (offsets.back() != size - 2 * grid.tail)
    throw Malformed("exponent payload: blocks don't add up to its size");
  for_each(grid.num_blocks, threads, [&](std::size_t b) {
    decode_block(body + offsets[b], offsets[b + 1] - offsets[b], x + grid.begin(b), grid.rows(b), cols, table,
                 k);
  });
  std::memcpy(x + n - grid.tail, body + size - 2 * grid.tail, 2 * grid.tail);
}

Counts exponent_counts(const std::uint16_t* x, std::size_t n, std::size_t cols, Prediction prediction,
                       std::size_t max_blocks, Isa isa) {
  const Grid grid(n, cols);
  const ExponentKernels& k = kernels(isa);
  Counts counts{};
  const std::size_t step = std::max<std::size_t>(1, grid.num_blocks / std::max<std::size_t>(1, max_blocks));
  Scratch& s = scratch();
  for (std::size_t b = 0; b < grid.num_blocks; b += step) {
    const std::size_t rows = grid.rows(b);
    k.split(x + grid.begin(b), rows * cols, s.exponents, s.symbols);
    const BlockShape shape = predict_block(s, rows, cols, prediction, k);
    for (std::size_t r = 0; r < rows; ++r) {
      for (std::size_t c = 0; c < cols; ++c) {
        const std::uint8_t e = s.exponents[r * cols + c];
        const unsigned part = (unsigned{shape.row_mean[r]} + shape.channel_mean[c] + 1u) >> 1 >> 2;
        const auto delta = static_cast<std::uint8_t>(e - shape.level - part);
        ++counts[e == 0 ? 256 : delta];
      }
    }
  }
  return counts;
}

ExponentTable exponent_train(const std::uint16_t* x, std::size_t n, std::size_t cols, std::size_t max_blocks,
                             Isa isa) {
  std::unique_ptr<ExponentTable> best;
  double best_bits = std::numeric_limits<double>::infinity();
  const Grid grid(n, cols);
  for (int mode = 0; mode < 4; ++mode) {
    const auto prediction = static_cast<Prediction>(mode);
    const Counts counts = exponent_counts(x, n, cols, prediction, max_blocks, isa);
    ExponentTable table = ExponentTable::train(prediction, counts);
    std::uint64_t symbols = 0;
    for (const std::uint64_t count : counts) symbols += count;
    const auto rows = static_cast<double>(std::min(grid.block_rows, std::max<std::size_t>(grid.num_rows, 1)));
    const double side = (has_rows(prediction) ? 8.0 / static_cast<double>(cols) : 0.0) +
                        (has_channels(prediction) ? 8.0 / rows : 0.0);
    const double bits = static_cast<double>(table.cost_bits(counts)) + side * static_cast<double>(symbols);
    if (bits < best_bits) {
      best_bits = bits;
      best = std::make_unique<ExponentTable>(table);
    }
  }
  return *best;
}

}  // namespace tiercache::codec
