#include "src/weights/torch_calls.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/weights/dtype_names.h"
#include "src/weights/tensor_bytes.h"

#include <array>
#include <utility>

namespace semitone::weights {
namespace {

constexpr auto kStorages = std::to_array<DtypeName>({
    {"DoubleStorage", at::kDouble},
    {"FloatStorage", at::kFloat},
    {"HalfStorage", at::kHalf},
    {"BFloat16Storage", at::kBFloat16},
    {"LongStorage", at::kLong},
    {"IntStorage", at::kInt},
    {"ShortStorage", at::kShort},
    {"CharStorage", at::kChar},
    {"ByteStorage", at::kByte},
    {"BoolStorage", at::kBool},
    {"ComplexFloatStorage", at::kComplexFloat},
});

// Names of Python's dtypes that have no storage class.
constexpr auto kOtherDtypes = std::to_array<DtypeName>({
    {"float8_e4m3fn", at::kFloat8_e4m3fn},
    {"float8_e5m2", at::kFloat8_e5m2},
    {"uint16", at::kUInt16},
    {"uint32", at::kUInt32},
    {"uint64", at::kUInt64},
});

// "float8_e5m2" of "torch.float8_e5m2".
std::string_view last_part(std::string_view name) {
  return name.substr(name.rfind('.') + 1);
}

constexpr std::size_t kMaxKey = 100;

// Arguments of a call, or parts of a tuple, with their types checked.
class Arguments {
 public:
  Arguments(const List& list, std::string what, std::string source, Copies* copies = nullptr)
      : list_(list), what_(std::move(what)), source_(std::move(source)), copies_(copies) {}

  [[noreturn]] void refuse(const std::string& got) const {
    throw FileError(kRead, what_ + " as PyTorch saves it in " + source_, got,
                    "save the model's state_dict() in Python, with safetensors for example");
  }

  std::size_t size() const { return list_.items.size(); }

  const Value& at(std::size_t index) const {
    if (index >= size()) refuse(std::to_string(size()) + " arguments");
    return *list_.items[index];
  }

  template <typename T>
  const T& get(std::size_t index) const {
    const T* held = at(index).get<T>();
    if (held == nullptr) refuse("an argument of another type at " + std::to_string(index));
    return *held;
  }

  // Refuses what would copy more than a pickle may.
  void count(std::size_t items) const {
    if (copies_ == nullptr) return;
    if (items > copies_->most - copies_->made) refuse("more than any list of weights has");
    copies_->made += items;
  }

  std::vector<std::int64_t> integers(std::size_t index) const {
    const auto& items = get<List>(index).items;
    if (items.size() > kMaxDimensions) refuse(std::to_string(items.size()) + " dimensions");
    count(items.size());
    std::vector<std::int64_t> numbers;
    for (const Value* item : items) {
      const auto* number = item->get<std::int64_t>();
      if (number == nullptr) refuse("an argument that is no tuple of integers");
      numbers.push_back(*number);
    }
    return numbers;
  }

 private:
  const List& list_;
  std::string what_;
  std::string source_;
  Copies* copies_;
};

// torch._utils._rebuild_tensor(storage, offset, sizes, strides), _v2 with requires_grad and hooks
// behind, _v3 with a dtype behind those, for storages of bytes.
TensorInStorage tensor_of(const Arguments& call) {
  const Storage& storage = call.get<Storage>(0);
  TensorInStorage tensor{storage, at::kFloat, call.get<std::int64_t>(1), call.integers(2),
                         call.integers(3)};
  if (storage.dtype.has_value()) {
    tensor.dtype = *storage.dtype;
  } else {
    const std::string& name = call.get<Global>(6).name;  // "torch.float8_e5m2"
    const auto dtype = dtype_named(kOtherDtypes, last_part(name));
    if (!dtype.has_value()) call.refuse("the dtype " + name);
    tensor.dtype = *dtype;
  }
  // {"conj": True}: the values in the storage are not those of the tensor.
  const std::size_t view = storage.dtype.has_value() ? 6 : 7;
  if (call.size() > view) {
    const auto* bits = call.at(view).get<Dict>();
    if (bits != nullptr && !bits->items.empty())
      call.refuse("a view that conjugates or negates; save tensor.resolve_conj().resolve_neg()");
  }
  return tensor;
}

// collections.OrderedDict(), or with a list of keys and values.
Dict ordered_dict_of(const Arguments& call) {
  Dict dict;
  if (call.size() == 0) return dict;
  const auto& items = call.get<List>(0).items;
  call.count(items.size());
  for (const Value* item : items) {
    const auto* pair = item->get<List>();
    if (pair == nullptr || pair->items.size() != 2) call.refuse("an item that is no pair");
    dict.items.emplace_back(pair->items[0], pair->items[1]);
  }
  return dict;
}

}  // namespace

decltype(Value::held) result_of(const std::string& function, const List& arguments,
                                const std::string& source, Copies& copies) {
  const Arguments call(arguments, function, source, &copies);
  if (function == "collections.OrderedDict") return ordered_dict_of(call);
  if (function == "collections.defaultdict") return Dict{};
  if (function == "torch._utils._rebuild_tensor" || function == "torch._utils._rebuild_tensor_v2" ||
      function == "torch._utils._rebuild_tensor_v3")
    return tensor_of(call);
  if (function == "torch._utils._rebuild_parameter" ||
      function == "torch._utils._rebuild_parameter_with_state") {
    const auto& tensor = call.get<TensorInStorage>(0);
    call.count(tensor.sizes.size() + tensor.strides.size());
    return tensor;
  }
  // What torch::pickle_save wraps dicts in, and TorchScript lists.
  if (function == "torch.jit._pickle.restore_type_tag" ||
      function == "torch.jit._pickle.build_tensorlist") {
    const Value& wrapped = call.at(0);
    if (const auto* dict = wrapped.get<Dict>()) call.count(dict->items.size());
    if (const auto* list = wrapped.get<List>()) call.count(list->items.size());
    if (wrapped.get<Dict>() != nullptr || wrapped.get<List>() != nullptr) return wrapped.held;
  }
  // A tensor with attributes: (function, class, arguments, attributes).
  if (function == "torch._tensor._rebuild_from_type_v2" && call.size() >= 3 &&
      call.get<Global>(0).name != function)
    return result_of(call.get<Global>(0).name, call.get<List>(2), source, copies);
  return Object{function, nullptr};
}

Storage storage_of(const Value& persistent_id, const std::string& source) {
  const List none;
  const auto* parts = persistent_id.get<List>();
  const Arguments id(parts == nullptr ? none : *parts, "a storage", source);
  if (id.get<std::string>(0) != "storage") id.refuse("'" + id.get<std::string>(0) + "'");
  const std::string& type = id.get<Global>(1).name;
  if (id.get<std::string>(2).size() > kMaxKey) id.refuse("a key of that length");
  Storage storage{id.get<std::string>(2), std::nullopt, id.get<std::int64_t>(4)};
  if (storage.elements < 0) id.refuse("a storage of " + std::to_string(storage.elements));
  if (id.size() > 5 && id.at(5).get<None>() == nullptr) id.refuse("a part of another storage");
  if (last_part(type) == "UntypedStorage") return storage;
  storage.dtype = dtype_named(kStorages, last_part(type));
  if (!storage.dtype.has_value()) id.refuse(type);
  return storage;
}

std::optional<std::string_view> storage_class_of(c10::ScalarType dtype) {
  return name_in(kStorages, dtype);
}

std::optional<std::string_view> other_dtype_name(c10::ScalarType dtype) {
  return name_in(kOtherDtypes, dtype);
}

}  // namespace semitone::weights
