// The bindings of the core, and nothing else: every idea lives in a header without Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "checksum.hpp"

namespace nb = nanobind;
using namespace nb::literals;

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

NB_MODULE(_core, m) {
  m.def(
      "crc32c",
      [](const Bytes& data, std::uint32_t crc) {
        nb::gil_scoped_release release;
        return tiercache::crc32c(crc, data.data(), data.size());
      },
      "data"_a, "crc"_a = 0, "CRC32C of a one-dimensional contiguous uint8 array, continued from `crc`.");
}
