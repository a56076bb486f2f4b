// Conversions between the core's records and Python's objects, for module_disk.hpp.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "disk.hpp"
#include "errors.hpp"

namespace tiercache::bindings {

namespace nb = nanobind;

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
  made["inline_requests"] = stats.inline_requests, made["inline_bytes"] = stats.inline_bytes;
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
  made["used_bytes"] = stats.used_bytes, made["spare_bytes"] = stats.spare_bytes;
  made["slots"] = stats.slots, made["records"] = stats.records;
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

}  // namespace tiercache::bindings
