#include "apps/semitone/commands.h"
#include "apps/semitone/exit_code.h"
#include "apps/semitone/flags.h"
#include "apps/semitone/output.h"
#include "apps/semitone/results.h"
#include "semitone/core/dtype.h"
#include "semitone/weights/file.h"
#include "src/core/printable.h"
#include "src/weights/file_names.h"

#include <c10/util/StringUtil.h>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <map>
#include <memory>
#include <string>

namespace semitone::cli {
namespace {

constexpr auto kConvert = "cli.convert";

struct ConvertFlags {
  std::string in;
  std::string out;
  std::string dtype = "keep";
  std::string entry;
  std::string strip_prefix;
};

// "pytorch, 122 tensors, 25557032 elements, 102.2 MB".
std::string summary(weights::Format format, const weights::StateDict& tensors) {
  std::int64_t elements = 0;
  std::size_t bytes = 0;
  for (const auto& item : tensors) {
    elements += item.value().numel();
    bytes += item.value().nbytes();
  }
  return fmt::format("{}, {} tensors, {} elements, {:.1f} MB", weights::name_of(format),
                     tensors.size(), elements, megabytes(static_cast<std::int64_t>(bytes)));
}

void print(const weights::StateDict& tensors) {
  std::size_t width = 0;
  for (const auto& item : tensors) width = std::max(width, item.key().size());
  for (const auto& item : tensors) {
    std::cout << fmt::format("{:<{}}  {:<9} {}\n", printable(item.key()), width,
                             dtype_name(item.value().scalar_type()),
                             c10::str(item.value().sizes()));
  }
}

weights::StateDict without_prefix(const weights::StateDict& tensors, const std::string& prefix) {
  const auto& items = tensors.items();
  const auto has_prefix = [&](const auto& item) { return item.key().starts_with(prefix); };
  if (!prefix.empty() && !std::any_of(items.begin(), items.end(), has_prefix))
    throw UsageError(kConvert, "--strip-prefix with which a name begins", "'" + prefix + "'",
                     "without OUT, this command lists the names");
  weights::StateDict renamed;
  for (const auto& item : tensors) {
    std::string name = item.key();
    if (name.starts_with(prefix)) name.erase(0, prefix.size());
    if (renamed.contains(name))
      throw UsageError(kConvert, "--strip-prefix that leaves each name once",
                       "'" + name + "' twice");
    renamed.insert(name, item.value());
  }
  return renamed;
}

void check(const ConvertFlags& flags) {
  if (flags.out.empty()) {
    if (flags.dtype == "keep") return;
    throw UsageError(kConvert, "OUT, the file to write with --dtype", "none",
                     "name it, or leave --dtype out to list the tensors");
  }
  if (!weights::format_of_name(flags.out)) {
    throw UsageError(kConvert, std::string("OUT that ends in ") + weights::kFileNames,
                     "'" + flags.out + "'");
  }
  // Another dtype, or a part of the file, would replace what cannot be had again.
  require_two_files(kConvert, {"IN", flags.in}, {"OUT", flags.out});
}

// The metadata without what every file for Python has.
std::map<std::string, std::string> own_metadata(const weights::Contents& contents) {
  auto metadata = contents.metadata;
  if (const auto format = metadata.find("format");
      format != metadata.end() && format->second == "pt")
    metadata.erase(format);
  return metadata;
}

int run(const ConvertFlags& flags) {
  check(flags);
  const auto contents = weights::read(flags.in, weights::ReadOptions().entry(flags.entry));
  const auto tensors = without_prefix(contents.tensors, flags.strip_prefix);
  if (flags.out.empty()) {
    print(tensors);
    std::cout << summary(contents.format, tensors) << '\n';
    return kSuccess;
  }
  weights::SaveOptions options;
  if (flags.dtype != "keep")
    options.dtype(flags.dtype == "fp32" ? c10::ScalarType::Float : parse_dtype(flags.dtype));
  if (weights::format_of_name(flags.out) == weights::Format::safetensors) {
    options.metadata(contents.metadata);
  } else if (const auto lost = own_metadata(contents); !lost.empty()) {
    std::cerr << fmt::format("'{}' does not keep the metadata of '{}': {}\n", flags.out, flags.in,
                             lost.begin()->first + (lost.size() > 1 ? ", …" : ""));
  }
  weights::write(flags.out, tensors, options);
  const auto written = weights::read(flags.out);
  std::cout << fmt::format("{}: {}\n{}: {}\n", flags.in, summary(contents.format, tensors),
                           flags.out, summary(written.format, written.tensors));
  return kSuccess;
}

constexpr auto kConvertFooter =
    R"(IN may be safetensors, a file of Python's torch.save, a TorchScript module or a model that
LibTorch's torch::save wrote. Nothing in it is executed.

Examples:
  semitone convert resnet50.pth
  semitone convert resnet50.pth resnet50.safetensors
  semitone convert checkpoint.pt model.safetensors --entry state_dict --strip-prefix module.
  semitone convert model.safetensors model.pt --dtype bf16

)";

}  // namespace

void add_convert_command(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand(
      "convert", "Convert weights between safetensors and Python's files, or list them");
  const auto flags = std::make_shared<ConvertFlags>();
  command.add_option("IN", flags->in, "File of weights, in any format")->required();
  command.add_option("OUT", flags->out,
                     "File to write: NAME.safetensors, or NAME.pt, .pth or .bin for Python's "
                     "torch.load; none: list the tensors of IN");
  Flags add(command, kConvert);
  add.choice("--dtype", flags->dtype, {"keep", "fp32", "bf16", "fp16"},
             "Dtype of the floating-point tensors in OUT");
  add.text("--entry", flags->entry, "NAME",
           "Part of a Python file to take: state_dict, if it saved a dict of several things");
  add.text("--strip-prefix", flags->strip_prefix, "TEXT",
           "Beginning of names to remove: module. after Python's DataParallel");
  command.footer(std::string(kConvertFooter) + kExitCodesHelp);
  command.callback([&action, &command, flags] {
    if (command.count("OUT") > 0 && flags->out.empty())
      throw UsageError(kConvert, "OUT to name a file", "''", "leave it out to list the tensors");
    action = [flags] { return run(*flags); };
  });
}

}  // namespace semitone::cli
