// The bindings of the core, and nothing else: every idea lives in a header without Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstring>

#include "arena.hpp"
#include "checksum.hpp"
#include "errors.hpp"
#include "module_codecs.hpp"
#include "module_disk.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace tiercache;

using Bytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

namespace {

// ---- errors
// -------------------------------------------------------------------------------------------------
const char* error_class(ErrorKind kind) {
  constexpr std::array names = {
      "ConfigError",      "StoreClosedError", "StoreLockedError", "StoreForkedError", "StoreTimeoutError",
      "PageMissingError", "PageStateError",   "PageCorruptError", "TierFullError",    "TierIOError"};
  return names[static_cast<std::size_t>(kind)];
}

nb::object text_or_none(const std::string& text) {
  return text.empty() ? nb::none() : nb::object(nb::str(text.c_str(), text.size()));
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const nb::object type = nb::module_::import_("tiercache.errors").attr(error_class(error.kind));
    nb::object made = type(nb::str(error.text.c_str()), "got"_a = text_or_none(error.got),
                           "limit"_a = text_or_none(error.limit), "remedy"_a = text_or_none(error.remedy));
    if (error.kind == ErrorKind::kIo) made.attr("errno") = error.code;
    PyErr_SetObject(type.ptr(), made.ptr());
  }
}

// ---- checksum
// -----------------------------------------------------------------------------------------------
void bind_checksum(nb::module_& m) {
  m.def(
      "crc32c",
      [](const Bytes& data, std::uint32_t crc) {
        nb::gil_scoped_release release;
        return crc32c(crc, data.data(), data.size());
      },
      "data"_a, "crc"_a = 0, "CRC32C of a one-dimensional contiguous uint8 array, continued from `crc`.");
  m.def("crc32c_path", &crc32c_path, "Name of the path that crc32c takes on this processor.");
  m.def(
      "crc32c_by",
      [](const std::string& path, const Bytes& data, std::uint32_t crc) -> nb::object {
        bool found = false;
        {
          nb::gil_scoped_release release;
          found = crc32c_by(path.c_str(), crc, data.data(), data.size());
        }
        return found ? nb::object(nb::int_(crc)) : nb::none();
      },
      "path"_a, "data"_a, "crc"_a = 0, "CRC32C by one named path; None where this processor lacks it.");
}

// ---- host arena
// ---------------------------------------------------------------------------------------------
void bind_arena(nb::module_& m) {
  nb::class_<ArenaStats>(m, "ArenaStats")
      .def_ro("capacity_bytes", &ArenaStats::capacity_bytes)
      .def_ro("used_bytes", &ArenaStats::used_bytes)
      .def_ro("slots", &ArenaStats::slots)
      .def_ro("staging_bytes", &ArenaStats::staging_bytes)
      .def_ro("staging_used_bytes", &ArenaStats::staging_used_bytes)
      .def_ro("largest_free_bytes", &ArenaStats::largest_free_bytes)
      .def_ro("waits", &ArenaStats::waits)
      .def_ro("timeouts", &ArenaStats::timeouts);
  nb::class_<Arena>(m, "Arena")
      .def(
          "__init__",
          [](Arena* self, std::uint64_t capacity_bytes, std::uint64_t staging_bytes, bool huge_pages,
             int numa_node, unsigned touch_threads, bool register_cuda) {
            nb::gil_scoped_release release;
            new (self) Arena(capacity_bytes, staging_bytes,
                             MemoryOptions{huge_pages, numa_node, touch_threads, register_cuda});
          },
          "capacity_bytes"_a, "staging_bytes"_a = 0, "huge_pages"_a = false, "numa_node"_a = -1,
          "touch_threads"_a = 2, "register_cuda"_a = false)
      .def("reserve", &Arena::reserve, "num_bytes"_a, "timeout_s"_a = 0.0, "staging"_a = false, NoGil())
      .def("release", &Arena::release, "offset"_a)
      .def(
          "view",
          [](nb::handle_t<Arena> self, std::uint64_t offset) {
            Arena& arena = nb::cast<Arena&>(self);
            const std::size_t size = arena.slot_bytes(offset);
            return nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>>(arena.at(offset), {size}, self);
          },
          "offset"_a, "The slot's memory. The array keeps the arena alive, not the slot.")
      .def_prop_ro("used_bytes", &Arena::used_bytes)
      .def_prop_ro("capacity_bytes", &Arena::capacity_bytes)
      .def_prop_ro("cuda_registered", &Arena::cuda_registered)
      .def_prop_ro("numa_bound", &Arena::numa_bound)
      .def("stats", &Arena::stats)
      .def("check_integrity", &Arena::check_integrity);
  m.def("available_memory", &available_memory, "root"_a = "/",
        "Bytes this process may still take: headroom of every cgroup above it (v1, v2) and MemAvailable.");
}

}  // namespace

NB_MODULE(_core, m) {
  nb::register_exception_translator(translate);
  bind_checksum(m);
  bind_arena(m);
  bindings::bind_disk(m);
  codec::bind_codecs(m);
}
