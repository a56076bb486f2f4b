// Bindings of the codecs: the part of module.cpp that knows them. Included there and nowhere else.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>

#include "codec_emulate.hpp"
#include "codec_exponent.hpp"
#include "codec_planes.hpp"
#include "codec_quant_host.hpp"
#include "codec_stream.hpp"
#include "codec_window_host.hpp"

namespace tiercache::codec {

namespace nb = nanobind;
using namespace nb::literals;

using ReadBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WriteBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ReadWords = nb::ndarray<const std::uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using WriteWords = nb::ndarray<std::uint16_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using CountArray = nb::ndarray<std::uint64_t, nb::shape<257>, nb::c_contig, nb::device::cpu>;
using ReadCounts = nb::ndarray<const std::uint64_t, nb::shape<257>, nb::c_contig, nb::device::cpu>;

inline void translate_malformed(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Malformed& error) {
    PyErr_SetString(nb::module_::import_("tiercache.errors").attr("CodecError").ptr(), error.what());
  }
}

inline void require_room(std::size_t have, std::size_t need) {
  if (have < need) throw std::invalid_argument("the output buffer is too small");
}

inline Counts to_counts(const ReadCounts& array) {
  Counts counts;
  std::copy_n(array.data(), counts.size(), counts.begin());
  return counts;
}

inline void bind_table(nb::module_& m) {
  nb::class_<ExponentTable>(m, "ExponentTable", "An immutable code for exponents against one prediction.")
      .def(
          "__init__",
          [](ExponentTable* self, int prediction, int base, const LevelRanks& levels,
             const SymbolOrder& order) {
            new (self) ExponentTable(static_cast<Prediction>(prediction), static_cast<std::uint8_t>(base),
                                     levels, order);
          },
          "prediction"_a, "base"_a, "levels"_a, "order"_a)
      .def_prop_ro("prediction", [](const ExponentTable& t) { return static_cast<int>(t.prediction); })
      .def_prop_ro("base", [](const ExponentTable& t) { return static_cast<int>(t.base); })
      .def_prop_ro("levels", [](const ExponentTable& t) { return t.levels; })
      .def_prop_ro("order", [](const ExponentTable& t) { return t.order; })
      .def(
          "cost_bits", [](const ExponentTable& t, const ReadCounts& c) { return t.cost_bits(to_counts(c)); },
          "counts"_a, "Bits that the counted exponents take, escapes included.")
      .def_static(
          "fresh_bits", [](const ReadCounts& c) { return ExponentTable::fresh_bits(to_counts(c)); },
          "counts"_a, "Bits that a table made for these counts would take.");
}

inline void bind_exponent(nb::module_& m) {
  m.def("exponent_bound", &exponent_bound, "n"_a, "cols"_a);
  m.def(
      "exponent_train",
      [](const ReadWords& x, std::size_t cols, std::size_t max_blocks, int isa) {
        nb::gil_scoped_release release;
        return exponent_train(x.data(), x.size(), cols, max_blocks, static_cast<Isa>(isa));
      },
      "x"_a, "cols"_a, "max_blocks"_a, "isa"_a);
  m.def(
      "exponent_cost",
      [](const ReadWords& x, std::size_t cols, const ExponentTable& table, std::size_t max_blocks, int isa) {
        nb::gil_scoped_release release;
        return exponent_cost(x.data(), x.size(), cols, table, max_blocks, static_cast<Isa>(isa));
      },
      "x"_a, "cols"_a, "table"_a, "max_blocks"_a, "isa"_a);
  m.def(
      "exponent_encode",
      [](const ReadWords& x, std::size_t cols, const ExponentTable& table, const WriteBytes& out, int isa,
         int threads, std::optional<CountArray> counts) {
        nb::gil_scoped_release release;
        require_room(out.size(), exponent_bound(x.size(), cols));
        Counts sampled{};
        const std::size_t size = exponent_encode(x.data(), x.size(), cols, table, out.data(),
                                                 static_cast<Isa>(isa), threads, counts ? &sampled : nullptr);
        if (counts) std::copy(sampled.begin(), sampled.end(), counts->data());
        return size;
      },
      "x"_a, "cols"_a, "table"_a, "out"_a, "isa"_a, "threads"_a, "counts"_a.none() = nb::none());
  m.def(
      "exponent_decode",
      [](const ReadBytes& body, std::size_t cols, const ExponentTable& table, const WriteWords& x, int isa,
         int threads) {
        nb::gil_scoped_release release;
        exponent_decode(body.data(), body.size(), x.data(), x.size(), cols, table, static_cast<Isa>(isa),
                        threads);
      },
      "body"_a, "cols"_a, "table"_a, "x"_a, "isa"_a, "threads"_a);
}

inline void bind_window(nb::module_& m) {
  m.def("window_bound", &window_bound, "n"_a);
  m.def(
      "window_encode",
      [](const ReadWords& x, const WriteBytes& out, int isa, int threads) {
        nb::gil_scoped_release release;
        return window_encode(x.data(), x.size(), out.data(), out.size(), static_cast<Isa>(isa), threads);
      },
      "x"_a, "out"_a, "isa"_a, "threads"_a, "Bytes written, or 0 when they would not fit.");
  m.def(
      "window_decode",
      [](const ReadBytes& body, const WriteWords& x, int isa, int threads) {
        nb::gil_scoped_release release;
        window_decode(body.data(), body.size(), x.data(), x.size(), static_cast<Isa>(isa), threads);
      },
      "body"_a, "x"_a, "isa"_a, "threads"_a);
}

inline void bind_planes(nb::module_& m) {
  m.def(
      "constant_planes",
      [](const ReadBytes& data, std::size_t width) {
        nb::gil_scoped_release release;
        return static_cast<int>(constant_planes(data.data(), data.size() / width, width));
      },
      "data"_a, "width"_a);
  m.def(
      "planes_encode",
      [](const ReadBytes& data, std::size_t width, const WriteBytes& out) {
        nb::gil_scoped_release release;
        require_room(out.size(), data.size() + 1);
        return planes_encode(data.data(), data.size() / width, width, out.data());
      },
      "data"_a, "width"_a, "out"_a);
  m.def(
      "planes_decode",
      [](const ReadBytes& body, std::size_t width, const WriteBytes& data) {
        nb::gil_scoped_release release;
        planes_decode(body.data(), body.size(), data.data(), data.size() / width, width);
      },
      "body"_a, "width"_a, "data"_a);
}

// A page of a lossy codec as Python gives it: bytes, (outer, tokens, channels, axis), (format, element).
using ShapeArgs = std::array<std::uint64_t, 4>;
using KindArgs = std::array<int, 2>;

inline QuantShape to_shape(const ShapeArgs& s) { return {s[0], s[1], s[2], static_cast<Axis>(s[3])}; }

inline void check_page(std::size_t bytes, const ShapeArgs& s, const KindArgs& kind) {
  const std::size_t width = kind[1] == 2 ? 4 : 2;
  if (kind[0] < 0 || kind[0] > 2 || kind[1] < 0 || kind[1] > 2 || s[3] > 1 ||
      bytes != s[0] * s[1] * s[2] * width)
    throw std::invalid_argument("the page has not the bytes of its shape");
}

inline void bind_quant(nb::module_& m) {
  m.def(
      "quant_encode",
      [](const ReadBytes& x, const ShapeArgs& shape, const KindArgs& kind, std::uint64_t seed,
         const WriteBytes& out, int isa, int threads) {
        QuantResult result{};
        {
          nb::gil_scoped_release release;
          check_page(x.size(), shape, kind);
          result = quant_encode(x.data(), to_shape(shape), static_cast<QuantFormat>(kind[0]),
                                static_cast<QuantElement>(kind[1]), seed, out.data(), out.size(),
                                static_cast<Isa>(isa), threads);
        }
        return nb::make_tuple(result.bytes, result.exceptions);
      },
      "x"_a, "shape"_a, "kind"_a, "seed"_a, "out"_a, "isa"_a, "threads"_a,
      "Bytes written (0 when they would not fit) and groups kept exact.");
  m.def(
      "quant_decode",
      [](const ReadBytes& body, const ShapeArgs& shape, const KindArgs& kind, const WriteBytes& x, int isa,
         int threads) {
        nb::gil_scoped_release release;
        check_page(x.size(), shape, kind);
        quant_decode(body.data(), body.size(), x.data(), to_shape(shape), static_cast<QuantFormat>(kind[0]),
                     static_cast<QuantElement>(kind[1]), static_cast<Isa>(isa), threads);
      },
      "body"_a, "shape"_a, "kind"_a, "x"_a, "isa"_a, "threads"_a);
}

// What the device computes, step by step on the host.
inline void bind_emulation(nb::module_& m) {
  m.def(
      "emulate_window_encode",
      [](const ReadWords& x, const WriteBytes& out) {
        return emulate_window_encode(x.data(), x.size(), out.data(), out.size());
      },
      "x"_a, "out"_a);
  m.def(
      "emulate_window_decode",
      [](const ReadBytes& body, const WriteWords& x) {
        return emulate_window_decode(body.data(), body.size(), x.data(), x.size());
      },
      "body"_a, "x"_a);
  m.def(
      "emulate_quant_encode",
      [](const ReadBytes& x, const ShapeArgs& shape, const KindArgs& kind, std::uint64_t seed,
         const WriteBytes& out) {
        check_page(x.size(), shape, kind);
        return emulate_quant_encode(x.data(), to_shape(shape), static_cast<QuantFormat>(kind[0]),
                                    static_cast<QuantElement>(kind[1]), seed, out.data(), out.size());
      },
      "x"_a, "shape"_a, "kind"_a, "seed"_a, "out"_a);
  m.def(
      "emulate_quant_decode",
      [](const ReadBytes& body, const ShapeArgs& shape, const KindArgs& kind, const WriteBytes& x) {
        check_page(x.size(), shape, kind);
        return emulate_quant_decode(body.data(), body.size(), x.data(), to_shape(shape),
                                    static_cast<QuantFormat>(kind[0]), static_cast<QuantElement>(kind[1]));
      },
      "body"_a, "shape"_a, "kind"_a, "x"_a);
}

// A copy that only some processors use, for tests on the others.
inline void bind_copies(nb::module_& m) {
  m.def(
      "stream_copy",
      [](const WriteBytes& out, const ReadBytes& data) {
        if (out.size() < data.size()) throw std::invalid_argument("stream_copy: the target is too small");
        stream_copy(out.data(), data.data(), data.size());
        stream_fence();
      },
      "out"_a, "data"_a);
}

inline void bind_codecs(nb::module_& m) {
  nb::register_exception_translator(translate_malformed);
  m.def("isa_available", [](int isa) { return isa_available(static_cast<Isa>(isa)); }, "isa"_a);
  m.def("isa_best", [] { return static_cast<int>(isa_best()); });
  bind_table(m);
  bind_exponent(m);
  bind_window(m);
  bind_planes(m);
  bind_copies(m);
  bind_quant(m);
  bind_emulation(m);
}

}  // namespace tiercache::codec
