// The disk tier's part of module.cpp; included by it alone.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "disk.hpp"
#include "errors.hpp"
#include "module_disk_types.hpp"
#include "reader.hpp"

namespace tiercache::bindings {

namespace nb = nanobind;
using namespace nb::literals;
using DiskBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DiskMutableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DiskNoGil = nb::call_guard<nb::gil_scoped_release>;

// A forked child must not run ~Disk: its threads are not there to be joined.
struct DiskHandle {
  explicit DiskHandle(DiskOptions options)
      : made(options), disk(new Disk(std::move(options))), owner(getpid()) {}
  ~DiskHandle() {
    if (getpid() == owner) delete disk;
  }
  DiskHandle(const DiskHandle&) = delete;
  DiskHandle& operator=(const DiskHandle&) = delete;
  DiskOptions made;
  Disk* disk;
  int owner;
};

inline DiskOptions options_of(const nb::kwargs& given) {
  DiskOptions options;
  const auto take = [&]<typename T>(const char* name, T& field) {
    if (given.contains(name)) field = nb::cast<T>(given[name]);
  };
  take("directories", options.segments.directories);
  take("capacity_bytes", options.segments.capacity_bytes);
  take("segment_bytes", options.segments.segment_bytes);
  take("epoch", options.segments.epoch);
  take("direct", options.segments.direct);
  take("max_errors", options.segments.max_errors);
  take("engine", options.engine);
  take("depth", options.depth);
  take("threads", options.threads);
  take("bounce_buffers", options.bounce_buffers);
  take("timeout_s", options.timeout_s);
  take("next_sequence", options.next_sequence);
  options.segments.uuid = array_of<Uuid>(nb::cast<nb::bytes>(given["uuid"]), "uuid");
  std::string durability = "scratch";
  take("durability", durability);
  if (durability == "process") options.durability = Durability::kProcess;
  if (durability == "power") options.durability = Durability::kPower;
  options.segments.shared = options.durability != Durability::kScratch;
  options.segments.sync_metadata = options.durability == Durability::kPower;
  bool faults = false, log = false;
  take("faults", faults);
  take("log", log);
  if (faults) options.faults = std::make_shared<Faults>();
  if (log) options.log = std::make_shared<WriteLog>();
  return options;
}

inline FaultRule rule_of(const std::string& kind, const std::string& action, const nb::kwargs& given) {
  constexpr std::array kinds = {"read", "write", "sync"};
  constexpr std::array actions = {"error", "short", "late", "reorder"};
  FaultRule rule;
  rule.kind = static_cast<IoKind>(std::ranges::find(kinds, kind) - kinds.begin());
  rule.action = static_cast<FaultAction>(std::ranges::find(actions, action) - actions.begin());
  const auto take = [&]<typename T>(const char* name, T& field) {
    if (given.contains(name)) field = nb::cast<T>(given[name]);
  };
  take("code", rule.code), take("skip", rule.skip), take("times", rule.times), take("bytes", rule.bytes);
  take("delay_ms", rule.delay_ms), take("hold", rule.hold), take("segment", rule.segment);
  return rule;
}

inline void bind_disk(nb::module_& m) {
  m.attr("INDEX_SEQUENCE_OFFSET") = offsetof(IndexValue, info) + offsetof(RecordInfo, sequence);
  m.def("index_fields", [](const nb::bytes& bytes) {
    const IndexValue value = value_of(bytes);
    if (const std::string reason = refuse_value(value); !reason.empty())
      throw Error(ErrorKind::kCorrupt, "disk tier: index entry", reason);
    return nb::make_tuple(fields_of(value.info), value.place.segment, value.place.offset,
                          record_length(value.info.stored_bytes), value.info.created_ns, value.hits);
  });
  nb::class_<WriterLock>(m, "WriterLock").def("__init__", [](WriterLock* self, const std::string& directory) {
    const Fd fd = open_directory(directory, false);
    new (self) WriterLock(fd.get(), directory);
  });
  nb::class_<Reader>(m, "Reader")
      .def("__init__",
           [](Reader* self, std::vector<std::string> directories, const nb::bytes& uuid) {
             new (self) Reader(std::move(directories), array_of<Uuid>(uuid, "uuid"));
           })
      .def("lease", [](Reader& self, const nb::bytes& value) { self.lease(value_of(value)); })
      .def("release", [](Reader& self, const nb::bytes& value) { self.release(value_of(value)); })
      .def("read",
           [](Reader& self, const nb::bytes& bytes, const DiskMutableBytes& out) {
             const IndexValue value = value_of(bytes);
             if (const std::string reason = refuse_value(value); !reason.empty()) {
               throw Error(ErrorKind::kCorrupt, "disk tier: index entry", reason);
             }
             if (out.size() != value.info.stored_bytes)
               throw Error(ErrorKind::kState, "disk tier: read of another size");
             nb::gil_scoped_release release;
             self.read(value, out.data());
           })
      .def_prop_ro("leases", &Reader::leases);
  nb::class_<DiskHandle>(m, "Disk")
      .def("__init__",
           [](DiskHandle* self, const nb::kwargs& given) {
             DiskOptions options = options_of(given);
             nb::gil_scoped_release release;
             new (self) DiskHandle(std::move(options));
           })
      .def(
          "open_existing", [](DiskHandle& self, bool keep) { return self.disk->open_existing(keep); },
          DiskNoGil())
      .def(
          "reserve", [](DiskHandle& self, std::uint64_t bytes) { return self.disk->reserve(bytes); },
          DiskNoGil())
      .def(
          "make_room",
          [](DiskHandle& self, std::uint64_t bytes, double wait_s) {
            return self.disk->make_room(bytes, wait_s);
          },
          DiskNoGil())
      .def("write",
           [](DiskHandle& self, std::uint64_t slot, const DiskBytes& data, const nb::object& meta) {
             const RecordInfo info = info_of(meta);
             nb::gil_scoped_release release;
             self.disk->write(slot, data.data(), data.size(), info);
           })
      .def("read",
           [](DiskHandle& self, std::uint64_t slot, const DiskMutableBytes& out, const nb::object& meta) {
             const RecordInfo info = info_of(meta);
             nb::gil_scoped_release release;
             self.disk->read(slot, out.data(), out.size(), info);
           })
      .def(
          "free", [](DiskHandle& self, std::uint64_t slot) { self.disk->free(slot); }, DiskNoGil())
      .def(
          "let_go", [](DiskHandle& self, std::uint64_t slot) { self.disk->let_go(slot); }, DiskNoGil())
      .def(
          "lookup",
          [](DiskHandle& self, const nb::sequence& digests) {
            std::vector<Digest> wanted;
            for (const nb::handle digest : digests)
              wanted.push_back(array_of<Digest>(nb::cast<nb::bytes>(digest), "digest"));
            nb::list all;
            for (const auto& found : self.disk->lookup(wanted)) {
              nb::object one = nb::none();
              if (found) one = nb::make_tuple(found->first, fields_of(found->second));
              all.append(one);
            }
            return all;
          },
          nb::sig("def lookup(self, digests: collections.abc.Sequence[bytes]) -> list"))
      .def("remove",
           [](DiskHandle& self, const nb::bytes& digest) {
             return self.disk->remove(array_of<Digest>(digest, "digest"));
           })
      .def("records",
           [](DiskHandle& self) {
             nb::list all;
             for (const auto& [slot, value] : self.disk->records())
               all.append(nb::make_tuple(slot, bytes_of(value)));
             return all;
           })
      .def("adopt",
           [](DiskHandle& self, const nb::bytes& value) { return self.disk->adopt(value_of(value)); })
      .def("take_changes",
           [](DiskHandle& self, std::size_t most, double wait_s, double gather_s) {
             std::vector<IndexChange> changes;
             {
               nb::gil_scoped_release release;
               changes = self.disk->take_changes(most, wait_s, gather_s);
             }
             nb::list all;
             for (const IndexChange& change : changes) {
               nb::object value = nb::none();
               if (change.value) value = bytes_of(*change.value);
               all.append(nb::make_tuple(bytes_of(change.digest), change.sequence, value));
             }
             return all;
           })
      .def(
          "confirm_changes", [](DiskHandle& self, bool written) { self.disk->confirm_changes(written); },
          DiskNoGil())
      .def(
          "journal_hits", [](DiskHandle& self) { self.disk->journal_hits(); }, DiskNoGil())
      .def(
          "flush", [](DiskHandle& self, double timeout_s) { return self.disk->flush(timeout_s); },
          DiskNoGil())
      .def("segment_ids", [](DiskHandle& self) { return self.disk->segment_ids(); })
      .def("scan",
           [](DiskHandle& self, const std::vector<std::uint32_t>& segments) {
             ScanReport report;
             {
               nb::gil_scoped_release release;
               report = self.disk->scan(segments);
             }
             return nb::make_tuple(report.found, report.adopted, report.bytes, report.bad);
           })
      .def(
          "trim", [](DiskHandle& self, bool refused) { return self.disk->trim(refused); }, DiskNoGil())
      .def("stats", [](DiskHandle& self) { return stats_of(self.disk->stats()); })
      .def(
          "check_integrity", [](DiskHandle& self) { self.disk->check_integrity(); }, DiskNoGil())
      .def(
          "close", [](DiskHandle& self, double timeout_s) { return self.disk->close(timeout_s); },
          DiskNoGil())
      .def_prop_ro("used_bytes", [](DiskHandle& self) { return self.disk->used_bytes(); })
      .def_prop_ro("spare_bytes", [](DiskHandle& self) { return self.disk->spare_bytes(); })
      .def_prop_ro("capacity_bytes", [](DiskHandle& self) { return self.disk->capacity_bytes(); })
      .def_prop_ro("next_sequence", [](DiskHandle& self) { return self.disk->next_sequence(); })
      .def("add_fault",
           [](DiskHandle& self, const std::string& kind, const std::string& action, const nb::kwargs& given) {
             if (!self.made.faults)
               throw Error(ErrorKind::kConfig, "disk tier: faults need faults=True at open");
             self.made.faults->add(rule_of(kind, action, given));
           })
      .def("clear_faults", [](DiskHandle& self) { self.made.faults->clear(); })
      .def_prop_ro("fault_hits", [](DiskHandle& self) { return self.made.faults->hits(); })
      .def("mark_log",
           [](DiskHandle& self, const std::string& what, const nb::bytes& bytes) {
             self.made.log->add({what, 0, 0, 0, std::string(bytes.c_str(), bytes.size())});
           })
      .def("take_log", [](DiskHandle& self) {
        nb::list all;
        for (const LogEvent& e : self.made.log->take()) {
          all.append(
              nb::make_tuple(e.what, e.id, e.segment, e.offset, nb::bytes(e.bytes.data(), e.bytes.size())));
        }
        return all;
      });
}

}  // namespace tiercache::bindings
