#include "src/checkpoint/archive_code.h"

#include "semitone/core/error.h"
#include "src/core/printable.h"

#include <ATen/core/class_type.h>
#include <ATen/core/jit_type.h>
#include <torch/csrc/jit/frontend/lexer.h>

#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <memory>
#include <string>
#include <unordered_set>

namespace semitone::checkpoint {
namespace {

using caffe2::serialize::PyTorchStreamReader;

// An optimizer has a class of about 100 bytes for each parameter.
constexpr std::size_t kMaxCode = std::size_t{64} << 20;

[[noreturn]] void refuse(const std::string& path, const std::string& got) {
  throw FileError("checkpoint.resume", fmt::format("values without code in '{}'", path), got,
                  "nothing was loaded; resume only from a checkpoint that a run has saved. "
                  "weights::load reads a model from such a file without its code");
}

// The rest of a line of code.
class Rest {
 public:
  explicit Rest(std::string_view line) : text_(line) {}

  bool is(std::string_view text) const { return text_ == text; }

  bool take(std::string_view text) {
    if (!text_.starts_with(text)) return false;
    text_.remove_prefix(text.size());
    return true;
  }

  bool take_name() {
    const std::size_t end = std::min(text_.size(), text_.find_first_not_of(kNameCharacters));
    text_.remove_prefix(end);
    return end > 0;
  }

  // A text in quotes, without what could end it elsewhere in LibTorch's eyes.
  bool take_string() {
    if (!take("\"")) return false;
    const auto ends = [](char c) {
      return c == '"' || c == '\\' || static_cast<unsigned char>(c) < ' ';
    };
    const auto end = std::ranges::find_if(text_, ends);
    text_.remove_prefix(static_cast<std::size_t>(end - text_.begin()));
    return take("\"");
  }

  // ["weight", "bias", ]
  bool take_strings() {
    if (!take("[")) return false;
    while (take_string()) {
      if (!take(", ")) break;
    }
    return take("]");
  }

  // "Dict[str, __torch__.Module]". Without parentheses there is no call and no function.
  bool is_type() {
    while (!text_.empty()) {
      if (take("Tuple[()]") || take_name()) continue;
      if (std::string_view(".,[] ").find(text_.front()) == std::string_view::npos) return false;
      text_.remove_prefix(1);
    }
    return true;
  }

 private:
  static constexpr std::string_view kNameCharacters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_";

  std::string_view text_;
};

// Values are not declarations: LibTorch computes constants of classes when it reads them.
bool is_declaration(std::string_view line) {
  if (line.empty()) return true;
  Rest rest(line);
  if (rest.take("class ")) {
    if (!rest.take_name()) return false;
    return rest.is(":") || rest.is("(Module):") || rest.is("(NamedTuple):");
  }
  if (!rest.take("  ")) return false;
  if (rest.take("__parameters__ = ") || rest.take("__buffers__ = "))
    return rest.take_strings() && rest.is("");
  if (rest.is("__annotations__ = []")) return true;
  if (rest.take("__annotations__["))
    return rest.take_string() && rest.take("] = ") && rest.is_type();
  return rest.take_name() && rest.take(" : ") && rest.is_type();
}

// LibTorch finds records by names in any case.
std::string in_lower_case(std::string name) {
  std::ranges::transform(name, name.begin(), [](unsigned char c) {
    return c < 0x80 ? static_cast<char>(std::tolower(c)) : static_cast<char>(c);
  });
  return name;
}

// A record that LibTorch can take for the code of a class. Classes are at "code/a/b.py" for the
// class "a.b.Name", with slashes for all dots of a name that the archive may choose.
bool may_be_code(const std::string& name) {
  return name.starts_with("code/") && !name.ends_with(".py.debug_pkl");
}

// LibTorch writes an attribute without quotes if its name looks like an identifier, and then cannot
// read it back if it is a word of TorchScript. It does not escape what it writes in quotes.
bool can_be_read_back(const std::string& name) {
  const auto is_letter = [](unsigned char c) { return c == '_' || (c < 0x80 && std::isalpha(c)); };
  const auto is_in_names = [&](unsigned char c) { return is_letter(c) || (c >= '0' && c <= '9'); };
  const bool looks_like_one = !name.empty() && is_letter(static_cast<unsigned char>(name[0])) &&
                              std::ranges::all_of(name, is_in_names);
  if (!looks_like_one) {
    const std::string quoted = '"' + name + '"';
    Rest rest(quoted);
    return rest.take_string() && rest.is("");
  }
  torch::jit::Lexer words(std::make_shared<torch::jit::Source>(name));
  return words.cur().kind == torch::jit::TK_IDENT;
}

void require_functionless(const c10::TypePtr& type, std::unordered_set<const c10::Type*>& seen) {
  if (!seen.insert(type.get()).second) return;
  if (const auto made = type->cast<c10::ClassType>()) {
    const std::string name = made->name().has_value() ? made->name()->qualifiedName() : "a class";
    // LibTorch's own classes, whose functions are not in the archive.
    if (name.starts_with("__torch__.torch.classes.")) return;
    if (!made->methods().empty() || !made->getForwardHooks().empty() ||
        !made->getForwardPreHooks().empty() || made->numConstants() > 0) {
      throw Error("checkpoint", "values without code to save", fmt::format("code in '{}'", name),
                  "resume() would refuse it: add a TorchScript module under a name of its own, and "
                  "of others save the tensors and numbers only");
    }
    for (const c10::ClassAttribute& attribute : made->getAttributes()) {
      if (can_be_read_back(attribute.getName())) continue;
      throw Error(
          "checkpoint", "names of modules, tensors and values that LibTorch reads back",
          fmt::format("{} in '{}'", printable(attribute.getName()), name),
          "rename it: words of TorchScript, such as 'in' or 'class', and names with quotes, "
          "backslashes or control characters cannot be read");
    }
  }
  for (const c10::TypePtr& inner : type->containedTypes()) require_functionless(inner, seen);
}

}  // namespace

bool has_attributes_only(std::string_view code) {
  while (!code.empty()) {
    const std::size_t end = std::min(code.size(), code.find('\n'));
    if (!is_declaration(code.substr(0, end))) return false;
    code.remove_prefix(std::min(code.size(), end + 1));
  }
  return true;
}

void require_no_code(const std::shared_ptr<caffe2::serialize::ReadAdapterInterface>& archive,
                     const std::string& path) {
  // LibTorch's own reader: another one could find other records in the same bytes.
  PyTorchStreamReader reader(archive);
  std::unordered_set<std::string> names;
  for (const std::string& name : reader.getAllRecords()) {
    const std::string lower = in_lower_case(name);
    // Long names are listed cut off, so that one could hide behind another.
    if (!names.insert(lower).second) refuse(path, "two records of the name " + printable(name));
    if (lower == "model.json") refuse(path, "an archive from before PyTorch 1.4, which is code");
    if (!may_be_code(lower)) continue;
    if (reader.getRecordSize(name) > kMaxCode)
      refuse(path, "more than 64 MiB in " + printable(name));
    const auto [data, size] = reader.getRecord(name);
    if (!has_attributes_only({static_cast<const char*>(data.get()), size}))
      refuse(path, "code in " + printable(name));
  }
}

void require_no_functions(const torch::jit::Object& object) {
  std::unordered_set<const c10::Type*> seen;
  require_functionless(object.type(), seen);
}

}  // namespace semitone::checkpoint
