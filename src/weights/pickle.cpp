#include "src/weights/pickle.h"

#include "semitone/core/error.h"
#include "src/weights/pickle_instructions.h"
#include "src/weights/tensor_bytes.h"
#include "src/weights/torch_calls.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <unordered_map>

namespace semitone::weights {
namespace {

// The length of a module's and a class's name together.
constexpr std::size_t kMaxGlobal = 200;

}  // namespace

const Value* Dict::find(std::string_view key) const {
  const auto is_key = [key](const std::pair<Value*, Value*>& item) {
    const auto* text = item.first->get<std::string>();
    const auto* number = item.first->get<std::int64_t>();
    return (text != nullptr && *text == key) ||
           (number != nullptr && std::to_string(*number) == key);
  };
  const auto found = std::find_if(items.rbegin(), items.rend(), is_key);
  return found == items.rend() ? nullptr : found->second;
}

// The state of one pickle's program.
class PickleMachine {
 public:
  explicit PickleMachine(PickleReader& reader) : reader_(reader) {}

  const Value& run() {
    for (;;) {
      const auto op = static_cast<Op>(integer<std::uint8_t>());
      if (op == Op::kStop) return *pop();
      if (!push_constant(op) && !change_stack(op) && !use_memo(op) && !build(op) && !call(op))
        refuse("instructions of protocol 2 or later", "byte " + std::to_string(unsigned(op)));
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& expected, const std::string& got) const {
    throw FileError(kRead, expected + " in the pickle of " + reader_.source_,
                    got + " at byte " + std::to_string(reader_.position_),
                    "is the file complete? copy or save it again");
  }

  // Input.

  std::string_view bytes(std::uint64_t count) {
    if (count > reader_.text_.size() - reader_.position_)
      refuse(std::to_string(count) + " more bytes", "the end");
    const auto found = reader_.text_.substr(reader_.position_, count);
    reader_.position_ += count;
    return found;
  }

  template <typename T>
  T integer() {
    T number{};
    const std::string_view text = bytes(sizeof(T));
    std::memcpy(&number, text.data(), text.size());
    return number;
  }

  std::string_view line() {
    const auto end = reader_.text_.find('\n', reader_.position_);
    if (end == std::string_view::npos) refuse("the end of a line", "the end");
    const std::string_view found = bytes(end - reader_.position_);
    bytes(1);
    return found;
  }

  // The stack.

  void push(decltype(Value::held) held) {
    if (reader_.values_.size() >= PickleReader::kMaxValues) {
      throw FileError(kRead,
                      "at most " + std::to_string(PickleReader::kMaxValues) +
                          " values in the pickle of " + reader_.source_,
                      "more", kSaveAlone);
    }
    stack_.push_back(&reader_.values_.emplace_back(Value{std::move(held)}));
  }

  Value* pop() {
    // What is below a mark belongs to what the mark begins.
    if (stack_.empty() || (!marks_.empty() && marks_.back() == stack_.size()))
      refuse("a value on the stack", "none");
    Value* value = stack_.back();
    stack_.pop_back();
    return value;
  }

  Value& top() {
    Value* value = pop();
    stack_.push_back(value);
    return *value;
  }

  // The values since the last mark.
  std::vector<Value*> pop_to_mark() {
    if (marks_.empty()) refuse("a mark on the stack", "none");
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<Value*> found(first, stack_.end());
    stack_.erase(first, stack_.end());
    marks_.pop_back();
    return found;
  }

  std::vector<Value*> pop_values(std::size_t count) {
    std::vector<Value*> found(count);
    for (std::size_t i = count; i > 0; --i) found[i - 1] = pop();
    return found;
  }

  template <typename T>
  T& must_be(Value& value, const char* type) {
    T* held = value.get<T>();
    if (held == nullptr) refuse(type, "another value");
    return *held;
  }

  // Groups of instructions. Each returns false if the instruction is not one of them.

  bool push_constant(Op op) {
    switch (op) {
      case Op::kNone:
        return push(None{}), true;
      case Op::kNewTrue:
        return push(true), true;
      case Op::kNewFalse:
        return push(false), true;
      case Op::kBinInt:
        return push(std::int64_t{integer<std::int32_t>()}), true;
      case Op::kBinInt1:
        return push(std::int64_t{integer<std::uint8_t>()}), true;
      case Op::kBinInt2:
        return push(std::int64_t{integer<std::uint16_t>()}), true;
      case Op::kLong1:
        return push_long(bytes(integer<std::uint8_t>())), true;
      case Op::kLong4:
        return push_long(bytes(integer<std::uint32_t>())), true;
      case Op::kBinFloat:
        return push(std::bit_cast<double>(__builtin_bswap64(integer<std::uint64_t>()))), true;
      default:
        return push_text(op);
    }
  }

  bool push_text(Op op) {
    switch (op) {
      case Op::kShortBinUnicode:
      case Op::kShortBinString:
      case Op::kShortBinBytes:
        return push(std::string(bytes(integer<std::uint8_t>()))), true;
      case Op::kBinUnicode:
      case Op::kBinString:
      case Op::kBinBytes:
        return push(std::string(bytes(integer<std::uint32_t>()))), true;
      case Op::kBinUnicode8:
      case Op::kBinBytes8:
      case Op::kByteArray8:
        return push(std::string(bytes(integer<std::uint64_t>()))), true;
      default:
        return false;
    }
  }

  void push_long(std::string_view text) {
    if (text.size() > sizeof(std::int64_t)) return push(LongInteger{});
    // Two's complement, the lowest byte first.
    const bool is_negative = !text.empty() && (static_cast<unsigned char>(text.back()) & 0x80) != 0;
    std::int64_t number = is_negative ? -1 : 0;
    std::memcpy(&number, text.data(), text.size());
    push(number);
  }

  bool change_stack(Op op) {
    switch (op) {
      case Op::kProto:
        if (const auto version = integer<std::uint8_t>(); version < 2 || version > 5)
          refuse("protocol 2 to 5", std::to_string(version));
        return true;
      case Op::kFrame:
        return integer<std::uint64_t>(), true;
      case Op::kMark:
        return marks_.push_back(stack_.size()), true;
      case Op::kPop:
        if (!marks_.empty() && marks_.back() == stack_.size()) return marks_.pop_back(), true;
        return pop(), true;
      case Op::kPopMark:
        return pop_to_mark(), true;
      case Op::kDup:
        return stack_.push_back(&top()), true;
      default:
        return false;
    }
  }

  bool use_memo(Op op) {
    switch (op) {
      case Op::kBinPut:
        return remember(integer<std::uint8_t>()), true;
      case Op::kLongBinPut:
        return remember(integer<std::uint32_t>()), true;
      case Op::kMemoize:
        return remember(static_cast<std::uint32_t>(memo_.size())), true;
      case Op::kBinGet:
        return get(integer<std::uint8_t>()), true;
      case Op::kLongBinGet:
        return get(integer<std::uint32_t>()), true;
      default:
        return false;
    }
  }

  void remember(std::uint32_t index) {
    if (memo_.size() >= PickleReader::kMaxValues) refuse("fewer numbered values", "millions");
    memo_[index] = &top();
  }

  void get(std::uint32_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) refuse("a value with this number", std::to_string(index));
    stack_.push_back(found->second);
  }

  bool build(Op op) {
    switch (op) {
      case Op::kEmptyDict:
        return push(Dict{}), true;
      case Op::kEmptyList:
      case Op::kEmptyTuple:
      case Op::kEmptySet:
        return push(List{}), true;
      case Op::kTuple:
      case Op::kList:
      case Op::kFrozenSet:
        return push(List{pop_to_mark()}), true;
      case Op::kTuple1:
        return push(List{pop_values(1)}), true;
      case Op::kTuple2:
        return push(List{pop_values(2)}), true;
      case Op::kTuple3:
        return push(List{pop_values(3)}), true;
      case Op::kAppend:
        return append(pop_values(1)), true;
      case Op::kAppends:
      case Op::kAddItems:
        return append(pop_to_mark()), true;
      case Op::kDict: {
        const auto items = pop_to_mark();
        push(Dict{});
        return set_items(items), true;
      }
      case Op::kSetItem:
        return set_items(pop_values(2)), true;
      case Op::kSetItems:
        return set_items(pop_to_mark()), true;
      default:
        return false;
    }
  }

  void append(const std::vector<Value*>& items) {
    Value& target = top();
    if (target.get<Object>() != nullptr) return;  // a list of a class of its own
    auto& list = must_be<List>(target, "a list");
    list.items.insert(list.items.end(), items.begin(), items.end());
  }

  void set_items(const std::vector<Value*>& items) {
    if (items.size() % 2 != 0) refuse("keys with values", "a key without one");
    Value& target = top();
    if (target.get<Object>() != nullptr) return;  // a dict of a class of its own
    auto& dict = must_be<Dict>(target, "a dict");
    for (std::size_t i = 0; i < items.size(); i += 2)
      dict.items.emplace_back(items[i], items[i + 1]);
  }

  bool call(Op op) {
    switch (op) {
      case Op::kGlobal: {
        const std::string_view module = line();
        return push_global(module, line()), true;
      }
      case Op::kStackGlobal: {
        const auto names = pop_values(2);
        push_global(must_be<std::string>(*names[0], "a module's name"),
                    must_be<std::string>(*names[1], "a name"));
        return true;
      }
      case Op::kBinPersId:
        push(storage_of(*pop(), reader_.source_));
        reader_.storages_.push_back(stack_.back()->get<Storage>());
        return true;
      case Op::kReduce:
      case Op::kNewObj: {
        const auto parts = pop_values(2);
        return push(called(*parts[0], must_be<List>(*parts[1], "arguments"))), true;
      }
      case Op::kNewObjEx: {
        const auto parts = pop_values(3);
        return push(called(*parts[0], must_be<List>(*parts[1], "arguments"))), true;
      }
      case Op::kBuild: {
        Value* state = pop();
        // An OrderedDict has attributes too, such as _metadata of a state dict.
        if (auto* object = top().get<Object>()) object->state = state;
        return true;
      }
      default:
        return false;
    }
  }

  void push_global(std::string_view module, std::string_view name) {
    if (module.size() + name.size() > kMaxGlobal) refuse("a name", "one of that length");
    push(Global{std::string(module) + "." + std::string(name)});
  }

  decltype(Value::held) called(const Value& function, const List& arguments) {
    const auto* global = function.get<Global>();
    if (global == nullptr) return Object{"a call of a value", nullptr, ""};
    Copies copies{reader_.copied_, PickleReader::kMaxValues};
    return result_of(global->name, arguments, copies);
  }

  PickleReader& reader_;
  std::vector<Value*> stack_;
  std::vector<std::size_t> marks_;  // sizes of the stack
  std::unordered_map<std::uint32_t, Value*> memo_;
};

const Value& PickleReader::read() {
  return PickleMachine(*this).run();
}

}  // namespace semitone::weights
