#include "src/train/checkpoint.h"

#include "semitone/core/error.h"
#include "src/autocast/model_entries.h"
#include "src/core/file.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <c10/util/StringUtil.h>
#include <torch/nn/module.h>
#include <torch/serialize.h>

#include <fmt/format.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <string_view>
#include <system_error>

namespace semitone::train {
namespace {

constexpr auto kCheckpoint = "train.checkpoint";
constexpr auto kFormat = "semitone.train/2";

std::string to_text(const RunConfig& config) {
  std::string text;
  for (const auto& [name, value] : config) text += fmt::format("{}={}\n", name, value);
  return text;
}

RunConfig from_text(const std::string& text) {
  RunConfig config;
  std::size_t begin = 0;
  for (std::size_t end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = text.substr(begin, end - begin);
    const auto equals = line.find('=');
    if (equals == std::string::npos) continue;
    config.emplace_back(line.substr(0, equals), line.substr(equals + 1));
  }
  return config;
}

std::string value_in(const NamedValues& values, const std::string& name) {
  for (const auto& [key, value] : values) {
    if (key == name) return value;
  }
  return "none";
}

void require_same_config(const std::filesystem::path& path, const RunConfig& saved,
                         const RunConfig& here) {
  for (const auto& [name, value] : here) {
    const std::string other = value_in(saved, name);
    if (other != value) {
      throw FileError(kCheckpoint, fmt::format("{} {} in '{}'", name, value, path.string()), other,
                      "resume with the options of the saved run");
    }
  }
}

// A model's parameters and buffers with their shapes, which a state must match. Module::load
// accepts any shape, and keeps tensors that the file lacks.
NamedValues tensors_of(const amp::Model& model) {
  NamedValues tensors;
  for (const amp::ModelEntry& entry : amp::entries_of(model))
    tensors.emplace_back(entry.name, c10::str(entry.tensor.sizes()));
  return tensors;
}

void require_tensors(const std::filesystem::path& path, const NamedValues& saved,
                     const NamedValues& here) {
  const auto require = [&](const std::string& name, const std::string& wanted,
                           const std::string& found) {
    if (found == wanted) return;
    throw FileError(kCheckpoint, fmt::format("'{}' {} in '{}'", name, wanted, path.string()), found,
                    "resume with the model of the saved run");
  };
  for (const auto& [name, shape] : here) require(name, shape, value_in(saved, name));
  for (const auto& [name, shape] : saved) require(name, value_in(here, name), shape);
}

c10::Device device_of(const Training& training) {
  return training.model.module()->parameters().front().device();
}

// The default generators that a training draws from, by the names of their states.
std::vector<std::pair<std::string, at::Generator>> generators_of(const Training& training) {
  std::vector<std::pair<std::string, at::Generator>> generators{
      {"random", at::detail::getDefaultCPUGenerator()}};
  const c10::Device device = device_of(training);
  if (!device.is_cpu())
    generators.emplace_back("random_device", at::globalContext().defaultGenerator(device));
  return generators;
}

at::Tensor state_of(at::Generator& generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state(at::Generator& generator, const at::Tensor& state) {
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

// Gathers the tensors of all ranks in rows, for groups on any device.
at::Tensor rows_by_rank(const at::Tensor& mine, const comm::Group& group) {
  const std::string bytes(static_cast<const char*>(mine.const_data_ptr()), mine.nbytes());
  std::vector<at::Tensor> rows;
  for (const std::string& text : group.all_gather(bytes)) {
    rows.push_back(torch::empty_like(mine));
    std::memcpy(rows.back().mutable_data_ptr(), text.data(), text.size());
  }
  return torch::stack(rows);
}

template <typename Part>
void write_part(torch::serialize::OutputArchive& archive, const std::string& key,
                const Part& part) {
  torch::serialize::OutputArchive inner;
  part.save(inner);
  archive.write(key, inner);
}

template <typename Part>
void read_part(torch::serialize::InputArchive& archive, const std::string& key, Part& part) {
  torch::serialize::InputArchive inner;
  archive.read(key, inner);
  part.load(inner);
}

template <typename T>
T read_value(torch::serialize::InputArchive& archive, const std::string& key) {
  c10::IValue value;
  archive.read(key, value);
  return value.to<T>();
}

// LibTorch's reader does not check the checksums of its own format, so a changed byte would be
// loaded as a weight. The file is the archive, followed by the CRC-32 of the archive.
constexpr std::size_t kChecksumBytes = 8;  // in hexadecimal

std::string checksum_of(std::string_view bytes) {
  uLong crc = ::crc32(0, nullptr, 0);
  crc = ::crc32_z(crc, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size());
  return fmt::format("{:08x}", crc);
}

// The archive's bytes. FileError if they do not match the checksum.
std::string read_checked(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(file), {});
  if (!file) {
    throw FileError(kCheckpoint, "to read '" + path.string() + "'",
                    std::error_code(errno, std::generic_category()).message());
  }
  const std::size_t size = bytes.size() < kChecksumBytes ? 0 : bytes.size() - kChecksumBytes;
  const std::string saved = bytes.substr(size);
  bytes.resize(size);
  if (saved != checksum_of(bytes)) {
    throw FileError(kCheckpoint,
                    "a state that `semitone train --save` wrote in '" + path.string() + "'",
                    "bytes that do not match the checksum",
                    "was it truncated or changed, or written by another program?");
  }
  return bytes;
}

void load(const std::filesystem::path& path, const Training& training, const RunConfig& config) {
  const int rank = training.group.rank();
  const std::string bytes = training.group.broadcast(rank == 0 ? read_checked(path) : "");
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size(), device_of(training));
  c10::IValue format;
  if (!archive.try_read("format", format) || !format.isString() ||
      format.toStringRef() != kFormat) {
    throw FileError(kCheckpoint,
                    "a state that `semitone train --save` wrote in '" + path.string() + "'",
                    "an archive of another kind");
  }
  require_same_config(path, from_text(read_value<std::string>(archive, "options")), config);
  require_tensors(path, from_text(read_value<std::string>(archive, "tensors")),
                  tensors_of(training.model));
  at::Tensor loss_sums;
  archive.read("loss_sums", loss_sums);
  auto generators = generators_of(training);
  std::vector<at::Tensor> random(generators.size());
  archive.read("random", random[0]);
  // Absent after a training on the CPU.
  for (std::size_t i = 1; i < generators.size(); ++i)
    archive.try_read(generators[i].first, random[i]);
  const Position position{read_value<std::int64_t>(archive, "step"), loss_sums[rank].item<double>(),
                          read_value<std::int64_t>(archive, "loss_count")};
  if (position.step < 0 || position.loss_count < 0)
    throw FileError(kCheckpoint, "a step and a count of 0 or more in '" + path.string() + "'",
                    fmt::format("{} and {}", position.step, position.loss_count));
  {
    auto fp32 = training.mixed.fp32_weights(training.model);
    read_part(archive, "model", *training.model.module());
    fp32.end();
  }
  read_part(archive, "optimizer", training.optimizer);
  read_part(archive, "mixed_precision", training.mixed);
  for (std::size_t i = 0; i < generators.size(); ++i) {
    if (random[i].defined()) set_state(generators[i].second, random[i][rank].cpu().clone());
  }
  training.position = position;
}

}  // namespace

void save_checkpoint(const std::filesystem::path& path, const Training& training,
                     const RunConfig& config) {
  const auto loss_sums =
      rows_by_rank(torch::full({}, training.position.loss_sum, torch::kDouble), training.group);
  std::vector<std::pair<std::string, at::Tensor>> random;
  for (auto& [name, generator] : generators_of(training))
    random.emplace_back(name, rows_by_rank(state_of(generator), training.group));
  if (training.group.rank() != 0) return;
  torch::serialize::OutputArchive archive;
  archive.write("format", c10::IValue(std::string(kFormat)));
  archive.write("options", c10::IValue(to_text(config)));
  archive.write("tensors", c10::IValue(to_text(tensors_of(training.model))));
  archive.write("step", c10::IValue(training.position.step));
  archive.write("loss_sums", loss_sums);
  archive.write("loss_count", c10::IValue(training.position.loss_count));
  for (const auto& [name, states] : random) archive.write(name, states);
  write_part(archive, "optimizer", training.optimizer);
  write_part(archive, "mixed_precision", training.mixed);
  std::string bytes;
  const auto append = [&bytes](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  };
  {
    const auto fp32 = training.mixed.fp32_weights(training.model);
    write_part(archive, "model", *training.model.module());
    archive.save_to(append);
  }
  write_file(path, bytes + checksum_of(bytes), kCheckpoint);
}

void load_checkpoint(const std::filesystem::path& path, const Training& training,
                     const RunConfig& config) {
  std::error_code ignored;
  if (training.group.rank() == 0 && !std::filesystem::is_regular_file(path, ignored))
    throw FileError(kCheckpoint, "a saved state '" + path.string() + "'", "no such file");
  try {
    load(path, training, config);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    const auto* const from_torch = dynamic_cast<const c10::Error*>(&error);
    std::string reason = from_torch ? from_torch->what_without_backtrace() : error.what();
    throw FileError(kCheckpoint, "a whole saved state in '" + path.string() + "'",
                    reason.substr(0, reason.find('\n')), "is the file damaged?");
  }
}

}  // namespace semitone::train
