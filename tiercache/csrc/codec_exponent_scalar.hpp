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

TC_TARGET void sample(const std::uint8_t* exponents, const std::uint8_t* prediction, Counts& counts) {
  for (std::size_t i = 0; i < kVector; ++i) {
    const auto delta = static_cast<std::uint8_t>(exponents[i] - prediction[i]);
    ++counts[exponents[i] == 0 ? 256 : delta];
  }
}

TC_TARGET void encode(const std::uint8_t* exponents, const BlockShape& shape, const ExponentTable& table,
                      EncodeSink& sink) {
  const std::size_t num_vectors = shape.rows * shape.cols / kVector;
  std::size_t row = 0;
  std::size_t col = 0;
  std::size_t num_escapes = 0;
  alignas(64) std::uint8_t prediction[kVector];
  for (int k = 0; k < kStreams; ++k) {
    std::uint8_t* out = sink.streams[k];
    std::uint64_t acc = 0;
    unsigned filled = 0;
    for (std::size_t v = quarter_begin(num_vectors, k); v < quarter_begin(num_vectors, k + 1); ++v) {
      const std::uint8_t* e = exponents + v * kVector;
      predict(shape, row, col, prediction);
      if (sink.counts != nullptr && is_sampled(v)) sample(e, prediction, *sink.counts);
      for (std::size_t i = 0; i < kVector; i += 4) {
        for (std::size_t j = i; j < i + 4; ++j) {
          const auto delta = static_cast<std::uint8_t>(e[j] - prediction[j]);
          const unsigned entry = table.by_delta[e[j] == 0 ? 256u : delta];
          acc |= std::uint64_t{entry & 0x7FFu} << filled;
          filled += entry >> 12;
          sink.escapes[num_escapes] = e[j];
          num_escapes += entry >> 11 & 1u;
        }
        store(out, acc);  // at most 7 + 4 * 11 bits wait here
        out += filled >> 3;
        acc >>= filled & ~7u;
        filled &= 7u;
      }
      if ((col += kVector) == shape.cols) {
        col = 0;
        ++row;
      }
    }
    store(out, acc);
    sink.stream_bytes[k] = static_cast<std::size_t>(out - sink.streams[k]) + (filled != 0);
  }
  sink.num_escapes = num_escapes;
}

// Decodes one stream symbol by symbol from bit `at`; false when it runs out or does not end where it should.
TC_TARGET bool decode_tail(const std::uint8_t* stream, std::size_t bytes, std::uint64_t at,
                           const ExponentTable& table, std::uint8_t* out, const std::uint8_t* end) {
  while (out < end) {
    const std::size_t byte = at >> 3;
    if (byte >= bytes) return false;
    std::uint64_t bits = 0;
    std::memcpy(&bits, stream + byte, bytes - byte < 8 ? bytes - byte : 8);
    const auto symbol = static_cast<std::uint8_t>(table.decode[bits >> (at & 7) & 0x7FFu] >> 8);
    *out++ = symbol;
    at += table.lengths[symbol];
  }
  return (at + 7) >> 3 == bytes;
}

// One look-up of a stream: up to six symbols.
#define TC_STEP(k)                                     \
  {                                                    \
    const std::uint64_t entry = decode[b##k & 0x7FFu]; \
    store(o##k, entry >> 8);                           \
    b##k >>= entry & 63u;                              \
    o##k += entry >> 56;                               \
  }
#define TC_ROUND TC_STEP(0) TC_STEP(1) TC_STEP(2) TC_STEP(3)
// 57 bits from bit position p; bit 63 marks how many were used once they are shifted out.
#define TC_FILL(k) \
  std::uint64_t b##k = load<std::uint64_t>(in + (p##k >> 3)) >> (p##k & 7) | std::uint64_t{1} << 63;
#define TC_USED(k) p##k += static_cast<unsigned>(__builtin_clzll(b##k));

TC_TARGET bool decode(const StreamSource& source, const ExponentTable& table, std::size_t num_vectors,
                      std::uint8_t* symbols) {
  const std::uint64_t* decode = table.decode.data();
  const std::uint8_t* in = source.streams[0];
  std::uint64_t end[kStreams];
  const std::uint8_t* last[kStreams];
  for (int k = 0; k < kStreams; ++k) {
    end[k] = static_cast<std::uint64_t>(source.streams[k] - in) + source.stream_bytes[k];
    const std::size_t count = quarter_begin(num_vectors, k + 1) - quarter_begin(num_vectors, k);
    last[k] = symbols + static_cast<std::size_t>(k) * kQuarterStride + count * kVector;
  }
  std::uint64_t p0 = 0, p1 = end[0] * 8, p2 = end[1] * 8, p3 = end[2] * 8;
  std::uint8_t *o0 = symbols, *o1 = o0 + kQuarterStride, *o2 = o1 + kQuarterStride, *o3 = o2 + kQuarterStride;
  while (true) {
    // A turn takes at most 55 bits and gives at most 30 symbols a stream.
    std::uint64_t turns = ~std::uint64_t{0};
    const std::uint64_t at[kStreams] = {p0 >> 3, p1 >> 3, p2 >> 3, p3 >> 3};
    const std::uint8_t* to[kStreams] = {o0, o1, o2, o3};
    for (int k = 0; k < kStreams; ++k) {
      const std::uint64_t bytes_left = end[k] > at[k] + 8 ? end[k] - at[k] - 8 : 0;
      const auto room = static_cast<std::uint64_t>(last[k] - to[k]);
      const std::uint64_t possible = bytes_left / 7 < room / 30 ? bytes_left / 7 : room / 30;
      if (possible < turns) turns = possible;
    }
    if (turns == 0) break;
    for (; turns != 0; --turns) {
      TC_FILL(0)
      TC_FILL(1)
      TC_FILL(2)
      TC_FILL(3) TC_ROUND TC_ROUND TC_ROUND TC_ROUND TC_ROUND TC_USED(0) TC_USED(1) TC_USED(2) TC_USED(3)
    }
  }
  return decode_tail(in, end[0], p0, table, o0, last[0]) && decode_tail(in, end[1], p1, table, o1, last[1]) &&
         decode_tail(in, end[2], p2, table, o2, last[2]) && decode_tail(in, end[3], p3, table, o3, last[3]);
}

#undef TC_STEP
#undef TC_ROUND
#undef TC_FILL
#undef TC_USED

// Replaces what is no delta: exponents of 0 and escaped ones. False when the escapes run out.
TC_TARGET bool patch(const std::uint8_t* symbols, std::uint8_t* exponents, const std::uint8_t*& escapes,
                     std::size_t& left) {
  for (std::size_t i = 0; i < kVector; ++i) {
    if (symbols[i] < kDeltas) continue;
    exponents[i] = 0;
    if (symbols[i] != kEscapeSymbol) continue;
    if (left == 0) return false;
    exponents[i] = *escapes++;
    --left;
  }
  return true;
}

TC_TARGET bool merge(const std::uint8_t* symbols, const std::uint8_t* rest, const BlockShape& shape,
                     const ExponentTable& table, const std::uint8_t* escapes, std::size_t num_escapes,
                     std::uint16_t* x) {
  const std::size_t num_vectors = shape.rows * shape.cols / kVector;
  std::size_t row = 0;
  std::size_t col = 0;
  alignas(64) std::uint8_t exponents[kVector];
  for (int k = 0; k < kStreams; ++k) {
    const std::uint8_t* s = symbols + static_cast<std::size_t>(k) * kQuarterStride;
    for (std::size_t v = quarter_begin(num_vectors, k); v < quarter_begin(num_vectors, k + 1); ++v) {
      predict(shape, row, col, exponents);
      std::uint8_t most = 0;
      for (std::size_t i = 0; i < kVector; ++i) {
        exponents[i] = static_cast<std::uint8_t>(exponents[i] + s[i] + table.base);
        most = s[i] > most ? s[i] : most;
      }
      if (most >= kDeltas && !patch(s, exponents, escapes, num_escapes)) return false;
      for (std::size_t i = 0; i < kVector; ++i) {
        const std::uint8_t r = rest[v * kVector + i];
        x[v * kVector + i] = static_cast<std::uint16_t>(exponents[i] << 7 | r >> 1 | (r & 1) << 15);
      }
      s += kVector;
      if ((col += kVector) == shape.cols) {
        col = 0;
        ++row;
      }
    }
  }
  return num_escapes == 0;
}

}  // namespace tiercache::codec::TC_PATH
