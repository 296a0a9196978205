#include "src/weights/named_tensors.h"

#include "semitone/core/error.h"
#include "src/core/parse_number.h"
#include "src/weights/tensor_bytes.h"

#include <string_view>

namespace semitone::weights {
namespace {

// Containers in each other. A pickle can describe one that contains itself.
constexpr std::size_t kMaxDepth = 100;
// Visited containers and tensors, and other values. A pickle can describe 2^n paths with n values.
constexpr std::size_t kMaxVisits = 1'000'000;
constexpr std::size_t kMaxScalars = 100'000'000;
constexpr std::size_t kMaxName = 1'000;
// Bytes of all names. Each can be a path of kMaxName bytes.
constexpr std::size_t kMaxNames = 100'000'000;

constexpr auto kSaveStateDict =
    "save model.state_dict() in Python instead, with safetensors.torch.save_file";

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

// Whether an object stands for a tensor that is not read: sparse, quantised, nested …
bool is_tensor(const Object& object) {
  return !object.problem.empty() || object.type.starts_with("torch._utils._rebuild_") ||
         object.type.starts_with("torch._tensor._rebuild_");
}

bool is_tensor(const Value& value) {
  const auto* object = value.get<Object>();
  return value.get<TensorInStorage>() != nullptr || (object != nullptr && is_tensor(*object));
}

// Values that neither are nor have tensors: a training program may have saved millions.
bool is_scalar(const Value& value) {
  return value.get<TensorInStorage>() == nullptr && value.get<Object>() == nullptr &&
         value.get<Dict>() == nullptr && value.get<List>() == nullptr;
}

// What to do with tensors that are not read.
enum class Unreadable { refuse, count };

class Search {
 public:
  Search(bool nested, Unreadable unreadable, std::string source)
      : nested_(nested), unreadable_(unreadable), source_(std::move(source)) {}

  void visit(const Value& value, const std::string& name, std::size_t depth) {
    if (is_scalar(value)) {
      if (++scalars_ > kMaxScalars) refuse("more than 100 million values");
      return;
    }
    if (depth > kMaxDepth) refuse("containers more than 100 deep");
    if (++visits_ > kMaxVisits) refuse("more than a million paths");
    if (name.size() > kMaxName) refuse("a name of more than 1000 bytes");
    const auto inner = [&](const std::string& key) {
      return name.empty() ? key : name + "." + key;
    };
    if (is_tensor(value)) {
      add(value, name);
    } else if (const Dict* dict = dict_in(value, nested_)) {
      for (const auto& [key, item] : dict->items) visit(*item, inner(name_of_key(*key)), depth + 1);
    } else if (const auto* list = value.get<List>()) {
      for (std::size_t i = 0; i < list->items.size(); ++i)
        visit(*list->items[i], inner(std::to_string(i)), depth + 1);
    } else if (const auto* object = value.get<Object>(); nested_ && object != nullptr) {
      visit_state(*object, name, depth);
    }
  }

  // Null for tensors that are not read.
  NamedTensors found;

 private:
  [[noreturn]] void refuse(const std::string& got) const {
    throw FileError(kRead, "named tensors in the pickle of " + source_, got);
  }

  // What a __getstate__ returned: only its code knows what the tensors in it are.
  void visit_state(const Object& object, const std::string& name, std::size_t depth) {
    if (object.state == nullptr) return;
    Search inside(nested_, Unreadable::count, source_);
    inside.visits_ = visits_;
    inside.scalars_ = scalars_;
    inside.visit(*object.state, name, depth + 1);
    visits_ = inside.visits_;
    scalars_ = inside.scalars_;
    if (inside.found.empty()) return;
    if (unreadable_ == Unreadable::refuse) {
      throw FileError(kRead, "tensors as attributes of '" + name + "' in " + source_,
                      "what __getstate__ of " + object.type + " made of them",
                      "such as packed weights of a quantised layer: save the state_dict of the "
                      "module before it was quantised, in Python");
    }
    found.emplace_back(name, nullptr);
  }

  void add(const Value& value, const std::string& name) {
    names_ += name.size();
    if (names_ > kMaxNames) refuse("names of more than 100 MB");
    const auto* object = value.get<Object>();
    if (object != nullptr && unreadable_ == Unreadable::refuse) {
      throw FileError(kRead, "a dense tensor for '" + name + "' in " + source_,
                      object->problem.empty() ? "what " + object->type + " makes" : object->problem,
                      "save it as a dense tensor in Python");
    }
    found.emplace_back(name, value.get<TensorInStorage>());
  }

  bool nested_;
  Unreadable unreadable_;
  std::string source_;
  std::size_t visits_ = 0;   // of tensors and containers
  std::size_t scalars_ = 0;  // visits of others
  std::size_t names_ = 0;
};

// "'state_dict', 'optimizer'": the keys under which there are containers with tensors, and objects
// of other classes. Empty for a state dict.
std::string entries_of(const Dict& dict, const std::string& source) {
  constexpr std::size_t kListed = 10;
  std::string list;
  std::size_t count = 0;
  Search search(/*nested=*/false, Unreadable::count, source);
  for (const auto& [key, value] : dict.items) {
    const std::string name = name_of_key(*key);
    if (is_tensor(*value) || name.ends_with("_extra_state")) continue;
    const std::size_t before = search.found.size();
    search.visit(*value, name, 0);
    if (search.found.size() == before || ++count > kListed) continue;
    list += (list.empty() ? "'" : ", '") + name + "'";
  }
  return list;
}

// The value under a key of a dict, or at a place of a list; null if there is none.
const Value* value_under(std::string_view key, const Value& value, bool nested) {
  if (const Dict* dict = dict_in(value, nested)) return dict->find(key);
  const auto* list = value.get<List>();
  const auto place = parse_number<std::size_t>(key);
  if (list == nullptr || !place.has_value() || *place >= list->items.size()) return nullptr;
  return list->items[*place];
}

const Value& entry_in(const Value& root, const std::string& entry, bool nested,
                      const std::string& source) {
  const Value* value = &root;
  std::string_view rest = entry;
  while (!rest.empty()) {
    // Keys may contain dots.
    const Value* next = value_under(rest, *value, nested);
    std::size_t used = rest.size();
    for (auto dot = rest.find('.'); next == nullptr && dot != std::string_view::npos;
         dot = rest.find('.', dot + 1)) {
      next = value_under(rest.substr(0, dot), *value, nested);
      used = dot + 1;
    }
    if (next == nullptr) {
      const Dict* dict = dict_in(*value, nested);
      const auto* list = value->get<List>();
      std::string entries = dict == nullptr ? "" : entries_of(*dict, source);
      if (!entries.empty()) entries.insert(0, "entries ");
      if (list != nullptr) entries = "a list of " + std::to_string(list->items.size());
      throw FileError(kRead, "an entry '" + entry + "' in " + source,
                      entries.empty() ? "none" : entries);
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
  if (const auto* list = chosen.get<List>(); list != nullptr && !list->items.empty()) {
    const std::string first = entry.empty() ? "0" : entry + ".0";
    throw FileError(
        kRead, expected, "a list of " + std::to_string(list->items.size()),
        "name one of them with entry(), or --entry of semitone convert: \"" + first + "\"");
  }
  if (dict == nullptr) throw FileError(kRead, expected, "another value", kSaveStateDict);
  if (!nested && entry.empty()) {
    const std::string entries = entries_of(*dict, source);
    if (!entries.empty()) {
      throw FileError(kRead, expected, "a dict of several things: " + entries,
                      "name one of them with entry(), or --entry of semitone convert");
    }
  }
  Search search(nested, Unreadable::refuse, source);
  search.visit(chosen, "", 0);
  if (search.found.empty() && !dict->items.empty())
    throw FileError(kRead, expected, "a dict without any tensor", kSaveStateDict);
  return std::move(search.found);
}

NamedTensors find_readable_tensors(const Value& root, const std::string& source) {
  Search search(/*nested=*/true, Unreadable::count, source);
  search.visit(root, "", 0);
  std::erase_if(search.found, [](const auto& named) { return named.second == nullptr; });
  return std::move(search.found);
}

}  // namespace semitone::weights
