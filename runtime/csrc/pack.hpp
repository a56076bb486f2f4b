// Copies of bf16 rows in the orders in which tiles.hpp reads them. What is missing of the last panel is zero.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "attention.hpp"
#include "tiles.hpp"

namespace tiercache::attention {

constexpr std::size_t panels(std::size_t count) { return (count + kPanel - 1) / kPanel; }

inline std::uint32_t join(Bf16 low, Bf16 high) { return low | static_cast<std::uint32_t>(high) << 16; }

// Rows as the columns of a panel, pairs along their width: [width / 2][64], from up to 64 rows.
inline void pack_as_columns(View<const Bf16> x, std::size_t head, std::size_t first, std::size_t rows,
                            std::size_t width, std::uint32_t* panel) {
  if (rows < kPanel) std::memset(panel, 0, width / 2 * kPanel * sizeof *panel);
  for (std::size_t r = 0; r < rows; ++r) {
    const Bf16* row = x.row(head, first + r);
    for (std::size_t p = 0; p < width / 2; ++p) panel[p * kPanel + r] = join(row[2 * p], row[2 * p + 1]);
  }
}

// Pairs of rows, in panels of 64 of their columns `stride` apart: [width / 64][32][64], from up to 64 rows.
inline void pack_row_pairs(View<const Bf16> x, std::size_t head, std::size_t first, std::size_t rows,
                           std::size_t width, std::uint32_t* panel, std::size_t stride) {
  for (std::size_t c = 0; c < width; c += kPanel, panel += stride)
    for (std::size_t p = 0; p < kPanel / 2; ++p) {
      std::uint32_t* to = panel + p * kPanel;
      if (2 * p + 1 < rows) {
        const Bf16 *even = x.row(head, first + 2 * p) + c, *odd = x.row(head, first + 2 * p + 1) + c;
        for (std::size_t i = 0; i < kPanel; ++i) to[i] = join(even[i], odd[i]);
      } else if (2 * p < rows) {
        const Bf16* even = x.row(head, first + 2 * p) + c;
        for (std::size_t i = 0; i < kPanel; ++i) to[i] = even[i];
      } else {
        std::memset(to, 0, kPanel * sizeof *to);
      }
    }
}

// Columns as rows, pairs along the rows: [width][stride] of which 32 pairs are written, from up to 64 rows.
inline void pack_transposed(View<const Bf16> x, std::size_t head, std::size_t first, std::size_t rows,
                            std::size_t width, std::uint32_t* to, std::size_t stride) {
  for (std::size_t p = 0; p < kPanel / 2; ++p) {
    const Bf16* even = 2 * p < rows ? x.row(head, first + 2 * p) : nullptr;
    const Bf16* odd = 2 * p + 1 < rows ? x.row(head, first + 2 * p + 1) : nullptr;
    for (std::size_t c = 0; c < width; ++c)
      to[c * stride + p] = join(even != nullptr ? even[c] : Bf16{0}, odd != nullptr ? odd[c] : Bf16{0});
  }
}

}  // namespace tiercache::attention
