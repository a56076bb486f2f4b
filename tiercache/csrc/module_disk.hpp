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

namespace tiercache::bindings {

namespace nb = nanobind;
using namespace nb::literals;
using DiskBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DiskMutableBytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using DiskNoGil = nb::call_guard<nb::gil_scoped_release>;

template <typename Array>
Array array_of(const nb::bytes& bytes, const char* field) {
  Array made{};
  if (bytes.size() != made.size()) {
    throw Error(ErrorKind::kConfig, std::string("disk tier: ") + field,
                std::to_string(bytes.size()) + " bytes", std::to_string(made.size()) + " bytes");
  }
  std::memcpy(made.data(), bytes.data(), made.size());
  return made;
}

template <std::size_t N>
void set_text(std::array<char, N>& field, const nb::object& text, const char* name) {
  const auto value = nb::cast<std::string>(text);
  if (value.size() >= N)
    throw Error(ErrorKind::kConfig, std::string("disk tier: ") + name, value, std::to_string(N - 1));
  std::ranges::copy(value, field.begin());
}

inline RecordInfo info_of(const nb::object& meta) {
  RecordInfo info;
  info.digest = array_of<Digest>(nb::cast<nb::bytes>(meta.attr("digest")), "digest");
  info.name_space = array_of<Digest>(nb::cast<nb::bytes>(meta.attr("namespace")), "namespace");
  set_text(info.dtype, meta.attr("dtype"), "dtype");
  set_text(info.codec, meta.attr("codec"), "codec");
  const auto shape = nb::cast<std::vector<std::int64_t>>(meta.attr("shape"));
  if (shape.size() > info.shape.size()) {
    throw Error(ErrorKind::kConfig, "disk tier: shape", std::to_string(shape.size()) + " dimensions", "8");
  }
  info.ndim = static_cast<std::uint32_t>(shape.size());
  std::ranges::copy(shape, info.shape.begin());
  info.raw_bytes = nb::cast<std::uint64_t>(meta.attr("raw_bytes"));
  info.stored_bytes = nb::cast<std::uint64_t>(meta.attr("stored_bytes"));
  if (nb::cast<bool>(meta.attr("persistent"))) info.flags |= kPersistent;
  const nb::object key = meta.attr("key");
  if (key.is_none()) return info;
  info.flags |= kHasKey;
  info.node = array_of<Digest>(nb::cast<nb::bytes>(key.attr("node")), "key.node");
  info.layer = nb::cast<std::int32_t>(key.attr("layer"));
  info.graph = nb::cast<std::uint64_t>(key.attr("graph"));
  set_text(info.kind, key.attr("kind"), "key.kind");
  return info;
}

template <typename Array>
inline nb::bytes bytes_of(const Array& array) {
  return nb::bytes(reinterpret_cast<const char*>(array.data()), array.size());
}

// Of an untrusted header too: text ends at the array's end at the latest.
template <std::size_t N>
nb::str str_of(const std::array<char, N>& text) {
  return nb::str(text.data(), strnlen(text.data(), N));
}

// (digest, namespace, dtype, shape, codec, raw_bytes, stored_bytes, (node, layer, kind, graph) or None,
// persistent)
inline nb::tuple fields_of(const RecordInfo& info) {
  nb::list shape;
  for (std::size_t i = 0; i < std::min<std::size_t>(info.ndim, info.shape.size()); ++i)
    shape.append(info.shape[i]);
  nb::object key = nb::none();
  if (info.flags & kHasKey)
    key = nb::make_tuple(bytes_of(info.node), info.layer, str_of(info.kind), info.graph);
  return nb::make_tuple(bytes_of(info.digest), bytes_of(info.name_space), str_of(info.dtype),
                        nb::tuple(shape), str_of(info.codec), info.raw_bytes, info.stored_bytes, key,
                        (info.flags & kPersistent) != 0);
}

inline IndexValue value_of(const nb::bytes& bytes) {
  if (bytes.size() != sizeof(IndexValue))
    throw Error(ErrorKind::kCorrupt, "disk tier: index entry of another size");
  IndexValue value;
  std::memcpy(static_cast<void*>(&value), bytes.data(), sizeof value);
  return value;
}

inline nb::bytes bytes_of(const IndexValue& value) {
  return nb::bytes(reinterpret_cast<const char*>(&value), sizeof value);
}

inline nb::dict stats_of(const DriveStats& stats) {
  nb::dict made;
  made["reads"] = stats.reads, made["writes"] = stats.writes, made["syncs"] = stats.syncs;
  made["read_bytes"] = stats.read_bytes, made["written_bytes"] = stats.written_bytes;
  made["short_transfers"] = stats.short_transfers, made["errors"] = stats.errors;
  made["full_queues"] = stats.full_queues, made["unknown_completions"] = stats.unknown_completions;
  made["queued"] = stats.queued, made["in_flight"] = stats.in_flight;
  made["read_bytes_per_s"] = stats.read_bytes_per_s, made["write_bytes_per_s"] = stats.write_bytes_per_s;
  return made;
}

inline nb::dict stats_of(const DiskStats& stats) {
  nb::dict made, misses;
  for (const auto& [reason, count] : stats.misses) misses[nb::str(reason.c_str())] = count;
  nb::list drives;
  for (std::size_t i = 0; i < stats.drives.size(); ++i) {
    drives.append(stats_of(stats.drives[i]));
    drives[i]["rung"] = stats.rungs[i];
  }
  made["used_bytes"] = stats.used_bytes, made["slots"] = stats.slots, made["records"] = stats.records;
  made["pending_bytes"] = stats.pending_bytes, made["journal"] = stats.journal, made["hits"] = stats.hits;
  made["adopted"] = stats.adopted, made["refused"] = stats.refused, made["misses"] = misses;
  made["evicted_unclaimed"] = stats.evicted_unclaimed, made["moved_writes"] = stats.moved_writes;
  made["served_from_memory"] = stats.served_from_memory, made["drives"] = drives;
  made["segments"] = stats.segments.segments, made["file_bytes"] = stats.segments.file_bytes;
  made["free_bytes"] = stats.segments.free_bytes, made["withheld_bytes"] = stats.segments.withheld_bytes;
  made["leased_bytes"] = stats.segments.leased_bytes, made["growth_refused"] = stats.segments.growth_refused;
  made["quarantined_segments"] = stats.segments.quarantined, made["drives_off"] = stats.segments.drives_off;
  made["removed_segments"] = stats.segments.removed;
  return made;
}

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
    return nb::make_tuple(fields_of(value.info), value.place.segment, value.place.offset,
                          record_length(value.info.stored_bytes), value.info.created_ns, value.hits);
  });
  nb::class_<WriterLock>(m, "WriterLock").def("__init__", [](WriterLock* self, const std::string& directory) {
    const Fd fd = open_directory(directory, false);
    new (self) WriterLock(fd.get(), directory);
  });
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
          "lookup",
          [](DiskHandle& self, const nb::bytes& digest) -> nb::object {
            const auto found = self.disk->lookup(array_of<Digest>(digest, "digest"));
            if (!found) return nb::none();
            return nb::make_tuple(found->first, fields_of(found->second));
          },
          nb::sig("def lookup(self, digest: bytes) -> tuple | None"))
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
