// The window codec's loops in plain C++, compiled once a path: TC_PATH names the namespace and TC_TARGET the
// instructions. No include guard: that is the point.

namespace tiercache::codec::TC_PATH {

TC_TARGET std::size_t encode(const std::uint16_t* x, std::uint8_t* body, WindowLayout at, std::size_t begin,
                             std::size_t end, std::uint8_t* escapes, std::size_t room) {
  std::size_t used = 0;
  for (std::size_t g = begin; g < end; ++g) {
    const std::uint16_t* from = x + g * kGroup;
    std::uint8_t exponents[kGroup];
    std::uint8_t rest[kGroup];
    std::uint8_t most = 0;
    for (int i = 0; i < kGroup; ++i) {
      exponents[i] = static_cast<std::uint8_t>(from[i] >> 7);
      rest[i] = static_cast<std::uint8_t>(from[i] << 1 | from[i] >> 15);
      most = exponents[i] > most ? exponents[i] : most;
    }
    std::memcpy(body + at.rest() + g * kGroup, rest, kGroup);
    int best = -1;
    std::uint8_t base = 0;
    for (int k = 0; k < kCandidates; ++k) {
      const auto candidate = static_cast<std::uint8_t>(most - (kWindow - 1) - k);
      std::uint8_t inside = 0;
      for (int i = 0; i < kGroup; ++i)
        inside = static_cast<std::uint8_t>(inside +
                                           (static_cast<std::uint8_t>(exponents[i] - candidate) < kWindow));
      if (inside > best) {
        best = inside;
        base = candidate;
      }
    }
    body[at.base() + g] = base;
    std::uint64_t plane[3] = {};
    for (int i = 0; i < kGroup; ++i) {
      const auto distance = static_cast<std::uint8_t>(exponents[i] - base);
      const std::uint64_t code = distance < kWindow ? distance : kWindow;
      for (int b = 0; b < 3; ++b) plane[b] |= (code >> b & 1u) << i;
    }
    std::memcpy(body + at.planes() + g * 24, plane, 24);
    for (std::uint64_t left = plane[0] & plane[1] & plane[2]; left != 0; left &= left - 1) {
      if (used == room) return room + 1;
      escapes[used++] = exponents[__builtin_ctzll(left)];
    }
  }
  return used;
}

TC_TARGET bool decode(const std::uint8_t* body, WindowLayout at, std::size_t begin, std::size_t end,
                      const std::uint8_t* escapes, std::size_t num_escapes, std::uint16_t* x) {
  std::size_t used = 0;
  for (std::size_t g = begin; g < end; ++g) {
    std::uint64_t plane[3];
    std::memcpy(plane, body + at.planes() + g * 24, 24);
    std::uint8_t exponents[kGroup];
    const std::uint8_t base = body[at.base() + g];
    for (int i = 0; i < kGroup; ++i) {
      const std::uint64_t code = (plane[0] >> i & 1u) | (plane[1] >> i & 1u) << 1 | (plane[2] >> i & 1u) << 2;
      exponents[i] = static_cast<std::uint8_t>(base + code);
    }
    for (std::uint64_t left = plane[0] & plane[1] & plane[2]; left != 0; left &= left - 1) {
      if (used == num_escapes) return false;
      exponents[__builtin_ctzll(left)] = escapes[used++];
    }
    const std::uint8_t* rest = body + at.rest() + g * kGroup;
    for (int i = 0; i < kGroup; ++i)
      x[g * kGroup + static_cast<std::size_t>(i)] =
          static_cast<std::uint16_t>(exponents[i] << 7 | rest[i] >> 1 | (rest[i] & 1) << 15);
  }
  return used == num_escapes;
}

}  // namespace tiercache::codec::TC_PATH
