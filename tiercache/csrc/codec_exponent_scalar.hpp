// The exponent codec's loops in plain C++, compiled once a path: TC_PATH names the namespace and TC_TARGET
// the instructions. No include guard: that is the point.

namespace tiercache::codec::TC_PATH {

TC_TARGET void split(const std::uint16_t* x, std::size_t n, std::uint8_t* exponents, std::uint8_t* rest) {
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint16_t word = x[i];
    exponents[i] = static_cast<std::uint8_t>(word >> 7);
    rest[i] = static_cast<std::uint8_t>(word << 1 | word >> 15);
  }
}

TC_TARGET void row_sums(const std::uint8_t* exponents, std::size_t rows, std::size_t cols,
                        std::uint32_t* sums) {
  for (std::size_t r = 0; r < rows; ++r) {
    std::uint32_t sum = 0;
    for (std::size_t c = 0; c < cols; ++c) sum += exponents[r * cols + c];
    sums[r] = sum;
  }
}

TC_TARGET void channel_sums(const std::uint8_t* exponents, std::size_t rows, std::size_t cols,
                            std::uint16_t* sums) {
  for (std::size_t r = 0; r < rows; ++r)
    for (std::size_t c = 0; c < cols; ++c)
      sums[c] = static_cast<std::uint16_t>(sums[c] + exponents[r * cols + c]);
}

// The predictions of 64 columns of a row.
TC_TARGET inline void predict(const BlockShape& shape, std::size_t row, std::size_t col, std::uint8_t* out) {
  const unsigned row_mean = shape.row_mean[row];
  const std::uint8_t* channel = shape.channel_mean + col;
  for (std::size_t i = 0; i < kVector; ++i)
    out[i] = static_cast<std::uint8_t>(shape.level + ((row_mean + channel[i] + 1u) >> 1 >> 2));
}

// The symbols of 64 exponents against their predictions.
TC_TARGET inline void symbols64(const std::uint8_t* exponents, const std::uint8_t* prediction,
                                std::uint8_t base, std::uint8_t* symbols) {
  for (std::size_t i = 0; i < kVector; ++i) {
    const auto distance = static_cast<std::uint8_t>(exponents[i] - prediction[i] - base);
    const std::uint8_t symbol = distance < kDeltas ? distance : std::uint8_t{kEscapeSymbol};
    symbols[i] = exponents[i] == 0 ? std::uint8_t{kZeroSymbol} : symbol;
  }
}

// Writes one level of `size` elements and keeps the symbols of those that go on in `next`; returns how many.
TC_TARGET std::size_t encode_level(const std::uint8_t* symbols, std::size_t size, std::size_t level,
                                   const ExponentTable& table, Levels<std::uint8_t>& out,
                                   std::uint8_t* next) {
  const unsigned num_ranks = table.levels[level];
  const std::uint8_t* codes = table.code_of[level].data();
  PlaneWriter thirds{out.planes[level][2]};
  std::uint64_t num_thirds = 0;
  std::size_t going_on = 0;
  for (std::size_t v = 0; v < num_vectors(size); ++v) {
    std::uint64_t a = 0, b = 0, c = 0;
    unsigned with_c = 0;
    const std::size_t count = std::min(kVector, size - v * kVector);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint8_t symbol = symbols[v * kVector + i];
      const std::uint64_t code = codes[symbol];
      a |= (code / kA & 1) << i;
      b |= (code / kB & 1) << i;
      c |= (code / kC & 1) << with_c;
      with_c += static_cast<unsigned>(code / kThird & 1);
      next[going_on] = symbol;
      going_on += code / kGoesOn & 1;
    }
    store(out.planes[level][0] + 8 * v, a);
    if (has_b(num_ranks)) store(out.planes[level][1] + 8 * v, b);
    thirds.put(num_thirds, c, with_c);
    num_thirds += with_c;
  }
  out.sizes[level] = {static_cast<std::uint32_t>(size), static_cast<std::uint32_t>(num_thirds)};
  return going_on;
}

TC_TARGET void encode(const std::uint8_t* exponents, const BlockShape& shape, const ExponentTable& table,
                      EncodeSink& sink) {
  const std::size_t n = shape.rows * shape.cols;
  std::uint8_t* symbols = sink.work[0];
  std::uint8_t* next = sink.work[1];
  std::size_t row = 0;
  std::size_t col = 0;
  sink.num_escapes = 0;
  for (std::size_t v = 0; v < n / kVector; ++v) {
    const std::uint8_t* e = exponents + v * kVector;
    alignas(64) std::uint8_t prediction[kVector];
    predict(shape, row, col, prediction);
    symbols64(e, prediction, table.base, symbols + v * kVector);
    for (std::size_t i = 0; i < kVector; ++i) {
      sink.escapes[sink.num_escapes] = e[i];
      sink.num_escapes += table.is_escape[symbols[v * kVector + i]];
    }
    if ((col += kVector) == shape.cols) {
      col = 0;
      ++row;
    }
  }
  std::size_t size = n;
  for (std::size_t level = 0; level < static_cast<std::size_t>(table.num_levels); ++level) {
    size = encode_level(symbols, size, level, table, sink.levels, next);
    std::swap(symbols, next);
  }
}

// Reads one level, into ranks above its first one; `below` are those of the elements that go on. False unless
// all of both are used.
TC_TARGET bool decode_level(const Levels<const std::uint8_t>& in, std::size_t level, unsigned num_ranks,
                            const std::uint8_t* below, std::size_t num_below, std::uint8_t* ranks) {
  const auto [size, c_bits] = in.sizes[level];
  const unsigned first_third = has_c(num_ranks) ? 7 - num_ranks : 4;  // of a b with a bit c
  std::uint64_t num_thirds = 0;
  std::size_t used = 0;
  for (std::size_t v = 0; v < num_vectors(size); ++v) {
    const std::uint64_t valid = first_elements(size - v * kVector);
    const std::uint64_t a = load<std::uint64_t>(in.planes[level][0] + 8 * v) & valid;
    const std::uint64_t b = has_b(num_ranks) ? load<std::uint64_t>(in.planes[level][1] + 8 * v) & valid : 0;
    const std::uint64_t c = has_c(num_ranks) ? take_bits(in.planes[level][2], num_thirds, 64) : 0;
    unsigned with_c = 0;
    for (std::size_t i = 0; i < kVector && v * kVector + i < size; ++i) {
      auto rank = static_cast<unsigned>(a >> i & 1u);
      if (has_b(num_ranks)) rank = 2 * rank + static_cast<unsigned>(b >> i & 1u);
      if (rank >= first_third) rank = 2 * rank - first_third + static_cast<unsigned>(c >> with_c++ & 1u);
      ranks[v * kVector + i] = static_cast<std::uint8_t>(rank == num_ranks ? rank + below[used] : rank);
      used += rank == num_ranks;
    }
    num_thirds += with_c;
  }
  return used == num_below && num_thirds == c_bits;
}

TC_TARGET bool decode(const DecodeSource& source, const BlockShape& shape, const ExponentTable& table,
                      std::uint16_t* x) {
  const std::size_t n = shape.rows * shape.cols;
  std::uint8_t* ranks = source.work[0];
  std::uint8_t* below = source.work[1];
  bool good = true;
  std::size_t size = source.num_escapes;
  std::memset(ranks, 0, size);  // escapes are the rank after the last
  for (auto level = static_cast<std::size_t>(table.num_levels); level-- > 0;) {
    std::swap(ranks, below);
    good = decode_level(source.levels, level, table.levels[level], below, size, ranks) && good;
    size = source.levels.sizes[level][0];
  }
  std::size_t row = 0;
  std::size_t col = 0;
  std::size_t used = 0;
  for (std::size_t v = 0; v < n / kVector; ++v) {
    alignas(64) std::uint8_t prediction[kVector];
    predict(shape, row, col, prediction);
    for (std::size_t i = 0; i < kVector; ++i) {
      const std::uint8_t rank = ranks[v * kVector + i];
      auto e = static_cast<std::uint8_t>(table.delta_of[rank % 64] + prediction[i]);
      if (rank == table.zero_rank) e = 0;
      if (rank == table.escape_rank) {
        e = source.escapes[used];
        ++used;
      }
      const std::uint8_t r = source.rest[v * kVector + i];
      x[v * kVector + i] = static_cast<std::uint16_t>(e << 7 | r >> 1 | (r & 1) << 15);
    }
    if ((col += kVector) == shape.cols) {
      col = 0;
      ++row;
    }
  }
  return good && used == source.num_escapes;
}

}  // namespace tiercache::codec::TC_PATH
