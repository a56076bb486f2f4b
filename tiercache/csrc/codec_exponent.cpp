#include "codec_exponent.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <vector>

#include "codec_exponent_block.hpp"
#include "codec_parallel.hpp"
#include "codec_stream.hpp"

namespace tiercache::codec {
namespace {

// About so many vectors of a page are counted as it is encoded, to see whether its table still fits; of a
// small page every kLeastStep-th.
constexpr std::size_t kCountedVectors = 64;
constexpr std::size_t kLeastStep = 4;
constexpr std::size_t kTrainedVectors = 512;  // that training counts of a page, or all

// Steps over whole rows would see the same columns again and again.
Sampling every(std::size_t step, std::size_t cols, std::size_t vectors_before) {
  while (std::gcd(step, cols / kVector) != 1) ++step;
  return {(step - vectors_before % step) % step, step};
}

// What the blocks of one page have in common while it is encoded.
struct Page {
  const std::uint16_t* x;
  const Grid& grid;
  const ExponentTable& table;
  std::uint8_t* out;
  const ExponentKernels& kernels;
  std::size_t counted_step;

  [[nodiscard]] std::uint8_t* segment(std::size_t s) const {
    return out + 4 * grid.num_blocks + s * grid.segment_bytes(table.prediction);
  }
  std::size_t encode(std::size_t b, std::uint8_t* to, Counts* counts) const {
    const std::size_t size =
        encode_block(x + grid.begin(b), grid.rows(b), grid.cols, table, segment(b / grid.segment_blocks), to,
                     kernels, every(counted_step, grid.cols, grid.begin(b) / kVector), counts);
    store(out + 4 * b, static_cast<std::uint32_t>(size));
    return size;
  }
};

// Each block is written where it would lie if all before it were stored, then they are moved together.
std::uint8_t* encode_together(const Page& page, std::uint8_t* at, int threads, Counts* counts) {
  const Grid& grid = page.grid;
  std::uint8_t* const first = at;
  const auto place = [&](std::size_t b) { return first + b + 2 * grid.begin(b); };
  std::mutex adding;
  for_each(grid.num_blocks, threads, [&](std::size_t b) {
    Counts mine{};
    page.encode(b, place(b), counts != nullptr ? &mine : nullptr);
    if (counts == nullptr) return;
    const std::lock_guard lock(adding);
    for (std::size_t d = 0; d < mine.size(); ++d) (*counts)[d] += mine[d];
  });
  for (std::size_t b = 0; b < grid.num_blocks; ++b) {
    const std::size_t size = load<std::uint32_t>(page.out + 4 * b);
    std::memmove(at, place(b), size);
    at += size;
  }
  return at;
}

}  // namespace

std::size_t exponent_bound(std::size_t n, std::size_t cols) {
  const Grid grid(n, cols);
  return grid.head_bytes(Prediction::both) + grid.num_blocks + 2 * n;
}

std::size_t exponent_encode(const std::uint16_t* x, std::size_t n, std::size_t cols,
                            const ExponentTable& table, std::uint8_t* out, Isa isa, int threads,
                            Counts* counts) {
  const Grid grid(n, cols);
  const std::size_t step = std::max(kLeastStep, n / kVector / kCountedVectors);
  const Page page{x, grid, table, out, exponent_kernels(isa), step};
  if (has_channels(table.prediction))
    for_each(grid.num_segments, threads, [&](std::size_t s) {
      write_segment(x, grid, s, table.prediction, page.kernels, page.segment(s));
    });
  std::uint8_t* at = out + grid.head_bytes(table.prediction);
  if (threads <= 1 || grid.num_blocks <= 1) {
    for (std::size_t b = 0; b < grid.num_blocks; ++b) at += page.encode(b, at, counts);
  } else {
    at = encode_together(page, at, threads, counts);
  }
  stream_fence();
  if (grid.tail != 0) std::memcpy(at, x + n - grid.tail, 2 * grid.tail);
  return static_cast<std::size_t>(at - out) + 2 * grid.tail;
}

void exponent_decode(const std::uint8_t* body, std::size_t size, std::uint16_t* x, std::size_t n,
                     std::size_t cols, const ExponentTable& table, Isa isa, int threads) {
  const Grid grid(n, cols);
  const ExponentKernels& k = exponent_kernels(isa);
  const std::size_t head = grid.head_bytes(table.prediction);
  if (size < head + 2 * grid.tail) throw Malformed("exponent payload: too short for its directory");
  std::vector<std::size_t> offsets(grid.num_blocks + 1, head);
  for (std::size_t b = 0; b < grid.num_blocks; ++b)
    offsets[b + 1] = offsets[b] + load<std::uint32_t>(body + 4 * b);
  if (offsets.back() != size - 2 * grid.tail)
    throw Malformed("exponent payload: blocks don't add up to its size");
  const bool stream = streams(x, n * sizeof *x);
  for_each(grid.num_blocks, threads, [&](std::size_t b) {
    const std::uint8_t* means =
        body + 4 * grid.num_blocks + b / grid.segment_blocks * grid.segment_bytes(table.prediction);
    decode_block(body + offsets[b], offsets[b + 1] - offsets[b], size - offsets[b], x + grid.begin(b),
                 grid.rows(b), cols, table, means, k, stream);
    if (stream) stream_fence();
  });
  if (grid.tail != 0) std::memcpy(x + n - grid.tail, body + size - 2 * grid.tail, 2 * grid.tail);
}

Counts exponent_counts(const std::uint16_t* x, std::size_t n, std::size_t cols, Prediction prediction,
                       std::size_t max_blocks, Isa isa) {
  const Grid grid(n, cols);
  const ExponentKernels& k = exponent_kernels(isa);
  Counts counts{};
  const std::size_t step = std::max<std::size_t>(1, grid.num_blocks / std::max<std::size_t>(1, max_blocks));
  const std::size_t vectors = grid.num_rows * cols / kVector / step;
  const Sampling sampling = every(std::max<std::size_t>(1, vectors / kTrainedVectors), cols, 0);
  std::vector<std::uint8_t> means(1 + cols);
  for (std::size_t b = 0; b < grid.num_blocks; b += step) {
    if (has_channels(prediction))
      write_segment(x, grid, b / grid.segment_blocks, prediction, k, means.data());
    count_block(x + grid.begin(b), grid.rows(b), cols, prediction, means.data(), k, sampling, counts);
  }
  return counts;
}

namespace {

// Bits an exponent takes, those of the means included.
double cost(const ExponentTable& table, const Counts& counts, const Grid& grid) {
  std::uint64_t symbols = 0;
  for (const std::uint64_t count : counts) symbols += count;
  const auto rows = static_cast<double>(std::clamp<std::size_t>(grid.num_rows, 1, kSegmentRows));
  const double side = (has_rows(table.prediction) ? 8.0 / static_cast<double>(grid.cols) : 0.0) +
                      (has_channels(table.prediction) ? 8.0 / rows : 0.0);
  return side + static_cast<double>(table.cost_bits(counts)) /
                    static_cast<double>(std::max<std::uint64_t>(symbols, 1));
}

}  // namespace

double exponent_cost(const std::uint16_t* x, std::size_t n, std::size_t cols, const ExponentTable& table,
                     std::size_t max_blocks, Isa isa) {
  return cost(table, exponent_counts(x, n, cols, table.prediction, max_blocks, isa), Grid(n, cols));
}

ExponentTable exponent_train(const std::uint16_t* x, std::size_t n, std::size_t cols, std::size_t max_blocks,
                             Isa isa) {
  std::unique_ptr<ExponentTable> best;
  double best_bits = std::numeric_limits<double>::infinity();
  for (int mode = 0; mode < 4; ++mode) {
    const auto prediction = static_cast<Prediction>(mode);
    const Counts counts = exponent_counts(x, n, cols, prediction, max_blocks, isa);
    ExponentTable table = ExponentTable::train(prediction, counts);
    const double bits = cost(table, counts, Grid(n, cols));
    if (bits < best_bits) {
      best_bits = bits;
      best = std::make_unique<ExponentTable>(table);
    }
  }
  return *best;
}

}  // namespace tiercache::codec
