#include "src/weights/named_tensors.h"

#include "semitone/core/error.h"
#include "src/weights/tensor_bytes.h"

#include <string_view>

namespace semitone::weights {
namespace {

// Containers in each other. A pickle can describe one that contains itself.
constexpr std::size_t kMaxDepth = 100;
// Visited values. A pickle can describe 2^n paths with n values.
constexpr std::size_t kMaxVisits = 1'000'000;
constexpr std::size_t kMaxName = 1'000;

constexpr auto kSaveStateDict =
    "save model.state_dict() in Python instead, with safetensors for example";

// @param nested  whether objects count as dicts of their attributes
const Dict* dict_in(const Value& value, bool nested) {
  if (const auto* object = value.get<Object>()) {
    return object->state == nullptr || !nested ? nullptr : object->state->get<Dict>();
  }
  return value.get<Dict>();
}

std::string name_of_key(const Value& key) {
  if (const auto* text = key.get<std::string>()) return text->substr(0, kMaxName + 1);
  if (const auto* number = key.get<std::int64_t>()) return std::to_string(*number);
  return "?";
}

class Search {
 public:
  Search(bool nested, std::string source) : nested_(nested), source_(std::move(source)) {}

  void visit(const Value& value, const std::string& name, std::size_t depth) {
    const auto refuse = [&](const std::string& got) {
      throw FileError(kRead, "named tensors in the pickle of " + source_, got);
    };
    if (depth > kMaxDepth) refuse("containers more than 100 deep");
    if (++visits_ > kMaxVisits) refuse("more than a million paths");
    if (name.size() > kMaxName) refuse("a name of more than 1000 bytes");
    const auto inner = [&](const std::string& key) {
      return name.empty() ? key : name + "." + key;
    };
    if (const auto* tensor = value.get<TensorInStorage>()) {
      found.emplace_back(name, tensor);
    } else if (const Dict* dict = dict_in(value, nested_)) {
      for (const auto& [key, item] : dict->items) visit(*item, inner(name_of_key(*key)), depth + 1);
    } else if (const auto* list = value.get<List>()) {
      for (std::size_t i = 0; i < list->items.size(); ++i)
        visit(*list->items[i], inner(std::to_string(i)), depth + 1);
    } else if (const auto* object = value.get<Object>(); object != nullptr && is_tensor(*object)) {
      throw FileError(kRead, "a dense tensor for '" + name + "' in " + source_,
                      "what " + object->type + " makes", "save it as a dense tensor in Python");
    }
  }

  NamedTensors found;

 private:
  // Of a kind that is not read: sparse, quantised, nested …
  static bool is_tensor(const Object& object) {
    return object.type.starts_with("torch._utils._rebuild_") ||
           object.type.starts_with("torch._tensor._rebuild_");
  }

  bool nested_;
  std::string source_;
  std::size_t visits_ = 0;
};

// "'state_dict', 'optimizer'": the keys under which there are containers with tensors, and objects
// of other classes. Empty for a state dict.
std::string entries_of(const Dict& dict, const std::string& source) {
  constexpr std::size_t kListed = 10;
  std::string list;
  std::size_t count = 0;
  Search search(/*nested=*/false, source);
  for (const auto& [key, value] : dict.items) {
    const std::string name = name_of_key(*key);
    if (value->get<TensorInStorage>() != nullptr || name.ends_with("_extra_state")) continue;
    const std::size_t before = search.found.size();
    search.visit(*value, name, 0);
    if (search.found.size() == before || ++count > kListed) continue;
    list += (list.empty() ? "'" : ", '") + name + "'";
  }
  return list;
}

const Value& entry_in(const Value& root, const std::string& entry, bool nested,
                      const std::string& source) {
  const Value* value = &root;
  std::string_view rest = entry;
  while (!rest.empty()) {
    const Dict* dict = dict_in(*value, nested);
    // Keys may contain dots.
    const Value* next = dict == nullptr ? nullptr : dict->find(rest);
    std::size_t used = rest.size();
    for (auto dot = rest.find('.'); next == nullptr && dict != nullptr && dot != std::string::npos;
         dot = rest.find('.', dot + 1)) {
      next = dict->find(rest.substr(0, dot));
      used = dot + 1;
    }
    if (next == nullptr) {
      const std::string entries = dict == nullptr ? "" : entries_of(*dict, source);
      throw FileError(kRead, "an entry '" + entry + "' in " + source,
                      entries.empty() ? "none" : "entries " + entries);
    }
    value = next;
    rest.remove_prefix(used);
  }
  return *value;
}

}  // namespace

NamedTensors find_tensors(const Value& root, const std::string& entry, bool nested,
                          const std::string& source) {
  const Value& chosen = entry_in(root, entry, nested, source);
  const std::string expected = "a dict of tensors in " + source;
  const auto* object = chosen.get<Object>();
  if (object != nullptr && !nested)
    throw FileError(kRead, expected, "an object of " + object->type, kSaveStateDict);
  const Dict* dict = dict_in(chosen, nested);
  if (dict == nullptr) throw FileError(kRead, expected, "another value", kSaveStateDict);
  if (!nested && entry.empty()) {
    const std::string entries = entries_of(*dict, source);
    if (!entries.empty()) {
      throw FileError(kRead, expected, "a dict of several things: " + entries,
                      "name one of them with entry(), or --entry of semitone convert");
    }
  }
  Search search(nested, source);
  search.visit(chosen, "", 0);
  if (search.found.empty() && !dict->items.empty())
    throw FileError(kRead, expected, "a dict without any tensor", kSaveStateDict);
  return std::move(search.found);
}

}  // namespace semitone::weights
