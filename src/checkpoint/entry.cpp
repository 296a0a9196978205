#include "src/checkpoint/entry.h"

#include "semitone/core/error.h"
#include "src/autocast/model_entries.h"
#include "src/checkpoint/archive_code.h"
#include "src/core/archive.h"
#include "src/weights/script_tensors.h"

#include <torch/csrc/jit/serialization/import.h>
#include <torch/serialize.h>

#include <caffe2/serialize/file_adapter.h>
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <utility>

namespace semitone::checkpoint {
namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

class StateEntry final : public Entry {
 public:
  StateEntry(std::string name, std::string kind, StateFunctions functions, PerRank per_rank)
      : Entry(std::move(name), std::move(kind), per_rank), functions_(std::move(functions)) {}

  void save(FileRecord&, const UseArchive& use) override {
    OutputArchive archive;
    functions_.save(archive);
    use_content(archive, use);
  }

  void read(const Source& source, const FileRecord&) override {
    InputArchive archive = source.archive();
    require_fitting(source, [&] { functions_.load(archive); });
  }

  // LibTorch cannot save an undefined tensor, such as one that the first step makes: such an object
  // has no state to put back.
  Undo set_aside() override {
    try {
      return Entry::set_aside();
    } catch (const c10::Error&) {
      return [] {};
    }
  }

  bool can_be_resharded() const override { return functions_.load_resharded != nullptr; }

  void read_resharded(const std::vector<Source>& of_ranks) override {
    std::vector<InputArchive> archives;
    archives.reserve(of_ranks.size());
    for (const Source& source : of_ranks) archives.push_back(source.archive());
    require_fitting(of_ranks.front(), [&] { functions_.load_resharded(archives); });
  }

 private:
  // The object's error does not know the entry and the file.
  void require_fitting(const Source& source, const std::function<void()>& load) const {
    try {
      load();
    } catch (const CommError&) {
      throw;
    } catch (const Error& error) {
      throw FileError("checkpoint.resume",
                      fmt::format("a state for '{}' in '{}'", name(), source.text()), error.what());
    }
  }

  StateFunctions functions_;
};

class GeneratorsEntry final : public Entry {
 public:
  GeneratorsEntry(std::string name, std::string kind, std::function<NamedGenerators()> generators,
                  bool optional)
      : Entry(std::move(name), std::move(kind), PerRank::yes,
              optional ? Turn::random : Turn::other),
        generators_(std::move(generators)),
        optional_(optional) {}

  bool may_be_missing() const override { return optional_; }

  void save(FileRecord&, const UseArchive& use) override {
    OutputArchive archive;
    for (auto& [name, generator] : generators_()) {
      const std::lock_guard lock(generator.mutex());
      archive.write(name, generator.get_state());
    }
    use_content(archive, use);
  }

  void read(const Source& source, const FileRecord&) override {
    InputArchive archive = source.archive();
    for (auto& [name, generator] : generators_()) {
      const auto state = optional_ ? find_value<at::Tensor>(archive, name, "checkpoint.resume")
                                   : read_value<at::Tensor>(archive, name, "checkpoint.resume");
      if (!state.has_value()) continue;
      const std::lock_guard lock(generator.mutex());
      generator.set_state(*state);
    }
  }

 private:
  std::function<NamedGenerators()> generators_;
  bool optional_;
};

}  // namespace

InputArchive Source::archive(c10::Device device) const {
  InputArchive archive;
  if (const auto* path = std::get_if<std::filesystem::path>(&where_)) {
    // The bytes that were checked are those that are loaded. LibTorch takes a file that it opens
    // itself for another format, with code, if its first bytes say so.
    const auto file = std::make_shared<caffe2::serialize::FileAdapter>(path->string());
    require_no_code(file, path->string());
    const auto read = [&file](std::uint64_t from, void* to, std::size_t bytes) {
      return file->read(from, to, bytes);
    };
    archive.load_from(read, [&file] { return file->size(); }, device);
  } else {
    const std::string& bytes = *std::get<1>(where_);
    archive.load_from(bytes.data(), bytes.size(), device);
  }
  return archive;
}

std::string Source::text() const {
  const auto* path = std::get_if<std::filesystem::path>(&where_);
  return path == nullptr ? "memory" : path->string();
}

std::unordered_map<std::string, at::Tensor> Source::tensors_of_script(
    const std::unordered_set<std::string>& names) const {
  if (const auto* path = std::get_if<std::filesystem::path>(&where_))
    return weights::read_script_tensors(*path, names);
  std::unordered_map<std::string, at::Tensor> tensors;
  for (const auto& entry : amp::entries_of(amp::Model(script())))
    tensors.emplace(entry.name, entry.tensor);
  return tensors;
}

torch::jit::Module Source::script() const {
  std::istringstream stream(*std::get<std::shared_ptr<const std::string>>(where_));
  return torch::jit::load(stream, c10::kCPU);
}

Entry::Undo Entry::set_aside() {
  const auto bytes = std::make_shared<std::string>();
  auto record = std::make_shared<FileRecord>();
  write(
      [&bytes](const void* data, std::size_t size) {
        bytes->append(static_cast<const char*>(data), size);
        return size;
      },
      *record);
  return [this, bytes, record] { read(Source(bytes), *record); };
}

std::unique_ptr<Entry> state_entry(std::string name, std::string kind, StateFunctions functions,
                                   PerRank per_rank) {
  return std::make_unique<StateEntry>(std::move(name), std::move(kind), std::move(functions),
                                      per_rank);
}

std::unique_ptr<Entry> generators_entry(std::string name, std::string kind,
                                        std::function<NamedGenerators()> generators,
                                        bool optional) {
  return std::make_unique<GeneratorsEntry>(std::move(name), std::move(kind), std::move(generators),
                                           optional);
}

}  // namespace semitone::checkpoint
