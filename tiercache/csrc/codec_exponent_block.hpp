// A page of the exponent codec cut up: blocks that stay in the second-level cache, and segments of about 1024
// rows that share their channels' means, so that wide rows don't pay for them in every block.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "codec_exponent_kernels.hpp"

namespace tiercache::codec {

constexpr std::size_t kSegmentRows = 1024;

inline bool has_rows(Prediction p) { return (static_cast<int>(p) & 1) != 0; }
inline bool has_channels(Prediction p) { return (static_cast<int>(p) & 2) != 0; }

struct Grid {
  std::size_t cols;
  std::size_t block_rows;
  std::size_t num_rows;
  std::size_t num_blocks;
  std::size_t segment_blocks;
  std::size_t num_segments;
  std::size_t tail;  // elements that fill no row

  Grid(std::size_t n, std::size_t cols_) : cols(cols_) {
    if (cols == 0 || cols % kVector != 0 || cols > kBlock) throw std::invalid_argument("columns of a block");
    block_rows = kBlock / cols;
    num_rows = n / cols;
    num_blocks = (num_rows + block_rows - 1) / block_rows;
    segment_blocks = (kSegmentRows + block_rows - 1) / block_rows;
    num_segments = (num_blocks + segment_blocks - 1) / segment_blocks;
    tail = n - num_rows * cols;
  }
  [[nodiscard]] std::size_t rows(std::size_t block) const {
    return std::min(block_rows, num_rows - block * block_rows);
  }
  [[nodiscard]] std::size_t begin(std::size_t block) const { return block * block_rows * cols; }
  // A segment's means: u8 mean, u8 channel_mean[cols].
  [[nodiscard]] std::size_t segment_bytes(Prediction p) const { return has_channels(p) ? 1 + cols : 0; }
  [[nodiscard]] std::size_t head_bytes(Prediction p) const {
    return 4 * num_blocks + num_segments * segment_bytes(p);
  }
};

constexpr std::size_t stored_bytes(std::size_t n) { return 1 + 2 * n; }

const ExponentKernels& exponent_kernels(Isa isa);

// Writes the means of one segment, from at most 256 of its rows.
void write_segment(const std::uint16_t* x, const Grid& grid, std::size_t segment, Prediction prediction,
                   const ExponentKernels& k, std::uint8_t* means);

// The vectors of a block that are counted: `first` and every `step`-th after it.
struct Sampling {
  std::size_t first;
  std::size_t step;
};

// Writes one block, at most stored_bytes(rows * cols), and returns its size; `means` is its segment's or
// null. Adds the sampled exponents against their predictions to `counts`, when it is given.
std::size_t encode_block(const std::uint16_t* x, std::size_t rows, std::size_t cols,
                         const ExponentTable& table, const std::uint8_t* means, std::uint8_t* out,
                         const ExponentKernels& k, Sampling sampling, Counts* counts);

// `readable` bytes from `block` on are the page's own. With `stream` a path may write past the caches, for
// the caller to fence. Throws Malformed.
void decode_block(const std::uint8_t* block, std::size_t size, std::size_t readable, std::uint16_t* x,
                  std::size_t rows, std::size_t cols, const ExponentTable& table, const std::uint8_t* means,
                  const ExponentKernels& k, bool stream);

// Adds a block's sampled exponents against their predictions to `counts`.
void count_block(const std::uint16_t* x, std::size_t rows, std::size_t cols, Prediction prediction,
                 const std::uint8_t* means, const ExponentKernels& k, Sampling sampling, Counts& counts);

}  // namespace tiercache::codec
