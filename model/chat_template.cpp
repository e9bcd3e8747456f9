// Evaluates the tree of a chat template: a model's own Jinja template, which turns a conversation into a prompt
// (template_syntax.hpp). Bounds its steps, memory and depth.
#include "model/chat_template.hpp"

#include <algorithm>
#include <cctype>
#include <ctime>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <unordered_set>

#include "model/template_syntax.hpp"

namespace echoline::model {

using chat::Dict;
using chat::Expression;
using chat::List;
using chat::None;
using chat::Statement;
using chat::Undefined;
using chat::Value;

struct ChatTemplate::Tree {
  std::vector<Statement> body;
};

namespace {

constexpr std::size_t kStepsMax = 1'000'000;   // expressions and statements per rendering
constexpr std::size_t kBytesMax = 256u << 20;  // of all texts and lists that a rendering creates
constexpr std::size_t kNestingMax = 64;      // levels of lists and mappings in a variable, which are freed recursively
constexpr std::size_t kDepthMax = 1000;      // levels of expressions, blocks and macros, because evaluation recurses
constexpr std::size_t kNameBytesShown = 40;  // of a template's name in an error message
constexpr std::string_view kErrorSource = "chat template";

using Integer = std::int64_t;
using Kind = Expression::Kind;
using Arguments = std::vector<Value>;

// Runs the statements of a template once and collects its output.
class Renderer {
 public:
  explicit Renderer(Dict variables) { scopes_.push_back(std::move(variables)); }

  Result<std::string> render(const std::vector<Statement>& body) {
    ECHO_TRY(run(body));
    return std::move(out_);
  }

 private:
  // How statements ended: at their end, or at a tag break or continue for the loop around them.
  enum class Flow { kNormal, kBreak, kContinue };

  template <class... Args>
  Error template_error(fmt::format_string<Args...> format, Args&&... args) const {
    return fail(Code::kInvalid, kErrorSource, "line {}: {}", line_, fmt::format(format, std::forward<Args>(args)...));
  }
  // An error of template_value.hpp, with the line added.
  Error with_line(const Error& error) const { return template_error("{}", error.detail); }

  // Counts a step, and fails if there were too many. charge_bytes() likewise, for memory.
  Status charge_step(std::size_t line) {
    line_ = line;
    if (++steps_ <= kStepsMax) return ok();
    return fail(Code::kExhausted, kErrorSource, "line {}: the template takes more than {} steps", line, kStepsMax);
  }
  Status charge_bytes(std::size_t bytes) {
    bytes_ += bytes;
    if (bytes_ <= kBytesMax) return ok();
    return fail(Code::kExhausted, kErrorSource, "line {}: the template makes more than {} bytes of text", line_,
                kBytesMax);
  }
  Result<Value> make_text(std::string text) {
    ECHO_TRY(charge_bytes(text.size()));
    return Value{std::move(text)};
  }

  // Counts one more level of recursion while it exists.
  struct DepthGuard {
    explicit DepthGuard(std::size_t& depth) : depth_(depth) { ++depth_; }
    ~DepthGuard() { --depth_; }

   private:
    std::size_t& depth_;
  };
  Status check_depth() const {
    if (depth_ <= kDepthMax) return ok();
    return fail(Code::kExhausted, kErrorSource, "line {}: the template is nested more than {} deep", line_, kDepthMax);
  }

  // Runs the statements in the current scope.
  Result<Flow> run(const std::vector<Statement>& body) {
    const DepthGuard depth_guard(depth_);
    ECHO_TRY(check_depth());
    for (const Statement& statement : body) {
      ECHO_TRY(charge_step(statement.line));
      switch (statement.kind) {
        case Statement::Kind::kText:
          ECHO_TRY(charge_bytes(statement.text.size()));
          out_ += statement.text;
          break;
        case Statement::Kind::kOutput: {
          ECHO_ASSIGN(const Value value, eval(*statement.expression));
          ECHO_ASSIGN(const std::string text, text_of(value));
          ECHO_TRY(charge_bytes(text.size()));
          out_ += text;
          break;
        }
        case Statement::Kind::kSet:
          ECHO_TRY(set_variable(statement));
          break;
        case Statement::Kind::kSetText: {  // {% set x %}...{% endset %}
          ECHO_ASSIGN(std::string text, output_of(statement.branches[0].body));
          chat::set_entry(scopes_.back(), statement.targets.front(), {std::move(text)});
          break;
        }
        case Statement::Kind::kMacro:
          macros_[statement.targets.front()] = &statement;
          break;
        case Statement::Kind::kScope: {
          const Scope scope(scopes_);
          ECHO_TRY(run(statement.branches[0].body));
          break;
        }
        case Statement::Kind::kBreak:
          return Flow::kBreak;
        case Statement::Kind::kContinue:
          return Flow::kContinue;
        case Statement::Kind::kIf:
          for (const Statement::Branch& branch : statement.branches) {
            bool holds = true;
            if (branch.condition) {
              ECHO_ASSIGN(const Value condition, eval(*branch.condition));
              holds = chat::is_truthy(condition);
            }
            if (!holds) continue;
            ECHO_ASSIGN(const Flow flow, run(branch.body));
            if (flow != Flow::kNormal) return flow;
            break;  // the branches after it are not evaluated
          }
          break;
        case Statement::Kind::kFor: {
          ECHO_ASSIGN(const Flow flow, run_loop(statement));
          if (flow != Flow::kNormal) return flow;
          break;
        }
      }
    }
    return Flow::kNormal;
  }

  // Runs `body` in a scope of its own, and returns its output instead of printing it.
  Result<std::string> output_of(const std::vector<Statement>& body) {
    const Scope scope(scopes_);
    std::string outside = std::exchange(out_, {});
    const auto flow = run(body);
    std::string output = std::exchange(out_, std::move(outside));
    if (!flow) return flow.error();
    return output;
  }

  // Runs {% set x = ... %} or {% set x.y = ... %}, where x is a namespace.
  Status set_variable(const Statement& statement) {
    ECHO_ASSIGN(Value value, eval(*statement.expression));
    line_ = statement.line;
    ECHO_TRY(check_nesting(value, /*depth=*/0, /*inside_namespace=*/!statement.attribute.empty()));
    if (statement.attribute.empty()) {
      chat::set_entry(scopes_.back(), statement.targets.front(), std::move(value));
      return ok();
    }
    const Value* target = find_variable(statement.targets.front());
    Dict* space = target ? target->dict() : nullptr;
    if (!space || !namespaces_.contains(space))
      return template_error("cannot set '{0}.{1}': '{0}' is not a namespace", statement.targets.front(),
                            statement.attribute);
    chat::set_entry(*space, statement.attribute, std::move(value));
    return ok();
  }

  // Fails if a value is nested too deep, or is a namespace inside a namespace, which could contain itself. Counts the
  // memory of each value that it visits.
  Status check_nesting(const Value& value, std::size_t depth, bool inside_namespace) {
    ECHO_TRY(charge_bytes(sizeof(Value)));
    if (depth > kNestingMax) return template_error("lists and mappings are nested more than {} deep", kNestingMax);
    if (const List* list = value.list())
      for (const Value& item : *list) ECHO_TRY(check_nesting(item, depth + 1, inside_namespace));
    if (const Dict* dict = value.dict()) {
      if (inside_namespace && namespaces_.contains(dict))
        return template_error("a namespace inside a namespace is not implemented");
      for (const auto& [key, item] : *dict) ECHO_TRY(check_nesting(item, depth + 1, inside_namespace));
    }
    return ok();
  }

  // Sets the variables of a loop to `item`, or to its elements if the loop has several variables.
  Status bind_targets(const Statement& statement, const Value& item) {
    if (statement.targets.size() == 1) {
      chat::set_entry(scopes_.back(), statement.targets.front(), item);
      return ok();
    }
    const List* parts = item.list();
    if (!parts || parts->size() != statement.targets.size())
      return template_error("cannot take {} loop variables from {}", statement.targets.size(), chat::kind(item));
    for (std::size_t i = 0; i < parts->size(); ++i) chat::set_entry(scopes_.back(), statement.targets[i], (*parts)[i]);
    return ok();
  }

  // A scope of variables for a loop, block or macro: opened by the constructor, closed by the destructor.
  struct Scope {
    explicit Scope(std::vector<Dict>& scopes) : scopes_(scopes) { scopes_.emplace_back(); }
    ~Scope() { scopes_.pop_back(); }

   private:
    std::vector<Dict>& scopes_;
  };

  // Runs {% for x in items if condition %} body {% else %} other {% endfor %}: branch 0 is the body, branch 1 the else
  // part, which runs if there are no items.
  Result<Flow> run_loop(const Statement& statement) {
    ECHO_ASSIGN(const Value iterable, eval(*statement.expression));
    ECHO_ASSIGN(List items, items_of(iterable));
    if (statement.condition) {
      List matching;
      for (Value& item : items) {
        const Scope scope(scopes_);
        ECHO_TRY(bind_targets(statement, item));
        ECHO_ASSIGN(const Value condition, eval(*statement.condition));
        if (chat::is_truthy(condition)) matching.push_back(std::move(item));
      }
      items = std::move(matching);
    }
    if (items.empty()) {
      const Scope scope(scopes_);
      return run(statement.branches[1].body);
    }
    const auto length = static_cast<Integer>(items.size());
    for (Integer i = 0; i < length; ++i) {
      ECHO_TRY(charge_step(statement.line));
      const Scope scope(scopes_);
      const auto index = static_cast<std::size_t>(i);
      Dict loop_variables{{"index", {i + 1}},         {"index0", {i}},
                          {"revindex", {length - i}}, {"revindex0", {length - i - 1}},
                          {"first", {i == 0}},        {"last", {i + 1 == length}},
                          {"length", {length}}};
      if (i > 0) loop_variables.emplace_back("previtem", items[index - 1]);
      if (i + 1 < length) loop_variables.emplace_back("nextitem", items[index + 1]);
      chat::set_entry(scopes_.back(), "loop", chat::make_dict(std::move(loop_variables)));
      ECHO_TRY(bind_targets(statement, items[index]));
      ECHO_ASSIGN(const Flow flow, run(statement.branches[0].body));
      if (flow == Flow::kBreak) break;
    }
    return Flow::kNormal;
  }

  // The variable of this name in the innermost scope that has one; null if there is none.
  const Value* find_variable(std::string_view name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const Value* value = chat::find(*scope, name)) return value;
    return nullptr;
  }

  Result<std::string> text_of(const Value& value) const {
    auto text = chat::text(value);
    if (!text) return with_line(text.error());
    return text;
  }

  // The items of a value for a loop: the elements of a list, the keys of a mapping or the characters of a string.
  Result<List> items_of(const Value& value) {
    if (value.is_undefined()) return List();
    if (const List* list = value.list()) {
      ECHO_TRY(charge_bytes(list->size() * sizeof(Value)));
      return *list;
    }
    List items;
    if (const Dict* dict = value.dict()) {
      for (const auto& [key, item] : *dict) items.push_back({key});
      return items;
    }
    if (const auto* text = value.as<std::string>()) {
      ECHO_TRY(charge_bytes(text->size() * sizeof(Value)));
      for (const std::string_view c : chat::characters(*text)) items.push_back({std::string(c)});
      return items;
    }
    return template_error("cannot go through {}", chat::kind(value));
  }

  // The value of the expression.
  Result<Value> eval(const Expression& e) {
    const DepthGuard depth_guard(depth_);
    ECHO_TRY(charge_step(e.line));
    ECHO_TRY(check_depth());
    switch (e.kind) {
      case Kind::kLiteral:
        return e.value;
      case Kind::kName: {
        const Value* value = find_variable(e.name);
        return value ? *value : Value{Undefined{e.name}};
      }
      case Kind::kList: {
        ECHO_ASSIGN(Arguments items, evaluate_parts(e, /*first=*/0));
        return chat::make_list(std::move(items));
      }
      case Kind::kMapping: {
        ECHO_ASSIGN(Arguments items, evaluate_parts(e, /*first=*/0));
        Dict dict;
        for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
          const auto* key = items[i].as<std::string>();
          if (!key) return template_error("the key of a mapping is {}, expected a string", chat::kind(items[i]));
          chat::set_entry(dict, *key, items[i + 1]);
        }
        return chat::make_dict(std::move(dict));
      }
      case Kind::kAttribute: {
        ECHO_ASSIGN(const Value object, eval(*e.parts[0]));
        return attribute_of(object, e.name);
      }
      case Kind::kIndex: {
        ECHO_ASSIGN(const Value object, eval(*e.parts[0]));
        ECHO_ASSIGN(const Value index, eval(*e.parts[1]));
        return element_of(object, index);
      }
      case Kind::kSlice:
        return eval_slice(e);
      case Kind::kCall:
        return eval_call(e);
      case Kind::kFilter:
        return eval_filter(e);
      case Kind::kTest:
        return eval_test(e);
      case Kind::kNot: {
        ECHO_ASSIGN(const Value value, eval(*e.parts[0]));
        return Value{!chat::is_truthy(value)};
      }
      case Kind::kNegative: {
        ECHO_ASSIGN(const Value value, eval(*e.parts[0]));
        if (const auto* i = value.as<Integer>(); i && *i != INT64_MIN) return Value{-*i};
        if (const auto* d = value.as<double>()) return Value{-*d};
        return template_error("cannot negate {}", chat::kind(value));
      }
      case Kind::kBinary:
        return eval_binary(e);
      case Kind::kConditional: {
        ECHO_ASSIGN(const Value condition, eval(*e.parts[0]));
        if (chat::is_truthy(condition)) return eval(*e.parts[1]);
        return e.parts[2] ? eval(*e.parts[2]) : Value{Undefined{"the missing else"}};
      }
    }
    return template_error("unknown expression");
  }

  // The values of the parts of `e` from index `first` on.
  Result<Arguments> evaluate_parts(const Expression& e, std::size_t first) {
    Arguments values;
    for (std::size_t i = first; i < e.parts.size(); ++i) {
      ECHO_ASSIGN(Value value, eval(*e.parts[i]));
      values.push_back(std::move(value));
    }
    return values;
  }

  // object.name, object[index] and, below, object[begin:end:stride], by the rules of Jinja and Python.
  Result<Value> attribute_of(const Value& object, const std::string& name) const {
    if (object.is_undefined()) return template_error("cannot take '.{}' of {}", name, chat::kind(object));
    if (const Dict* dict = object.dict())
      if (const Value* value = chat::find(*dict, name)) return *value;
    return Value{Undefined{name}};
  }

  Result<Value> element_of(const Value& object, const Value& index) const {
    if (const auto* key = index.as<std::string>()) return attribute_of(object, *key);
    const auto* i = index.as<Integer>();
    const List* list = object.list();
    const auto* text = object.as<std::string>();
    if (!i || (!list && !text)) return template_error("cannot index {} with {}", chat::kind(object), chat::kind(index));
    const auto text_characters = text ? chat::characters(*text) : std::vector<std::string_view>();
    const auto size = static_cast<Integer>(list ? list->size() : text_characters.size());
    const Integer position = *i < 0 ? *i + size : *i;
    if (position < 0 || position >= size) return Value{Undefined{fmt::format("element {}", *i)}};
    return list ? (*list)[static_cast<std::size_t>(position)]
                : Value{std::string(text_characters[static_cast<std::size_t>(position)])};
  }

  Result<Value> eval_slice(const Expression& e) {
    ECHO_ASSIGN(const Value object, eval(*e.parts[0]));
    std::optional<Integer> bounds[3];
    for (std::size_t i = 0; i < 3; ++i) {
      if (!e.parts[i + 1]) continue;
      ECHO_ASSIGN(const Value bound, eval(*e.parts[i + 1]));
      if (bound.as<None>()) continue;
      if (!bound.as<Integer>())
        return template_error("a bound of a slice is {}, expected an integer", chat::kind(bound));
      bounds[i] = *bound.as<Integer>();
    }
    const auto* text = object.as<std::string>();
    if (!text && !object.list()) return template_error("cannot slice {}", chat::kind(object));
    ECHO_ASSIGN(const List items, items_of(object));
    const auto size = static_cast<Integer>(items.size());
    const Integer stride = bounds[2].value_or(1);
    if (stride == 0) return template_error("the step of a slice is 0");
    // The end of a slice is exclusive, so it lies behind the last item or, backwards, before the first one.
    const Integer lowest = stride > 0 ? 0 : -1, highest = stride > 0 ? size : size - 1;
    // Counts a negative bound from the end, and limits bounds to the list.
    const auto resolve = [&](std::optional<Integer> bound, Integer if_absent) {
      if (!bound) return if_absent;
      return std::clamp(*bound < 0 ? *bound + size : *bound, lowest, highest);
    };
    const Integer begin = resolve(bounds[0], stride > 0 ? 0 : size - 1),
                  end = resolve(bounds[1], stride > 0 ? size : -1);
    List selected;
    const Integer clamped_stride = std::clamp(stride, -size - 1, size + 1);  // prevents overflow
    for (Integer i = begin; stride > 0 ? i < end : i > end; i += clamped_stride)
      selected.push_back(items[static_cast<std::size_t>(i)]);
    if (!text) return chat::make_list(std::move(selected));
    std::string out;
    for (const Value& c : selected) out += *c.as<std::string>();
    return make_text(std::move(out));
  }

  Result<Value> eval_binary(const Expression& e) {
    ECHO_ASSIGN(const Value a, eval(*e.parts[0]));
    if (e.name == "and" && !chat::is_truthy(a)) return a;
    if (e.name == "or" && chat::is_truthy(a)) return a;
    ECHO_ASSIGN(const Value b, eval(*e.parts[1]));
    line_ = e.line;
    if (e.name == "and" || e.name == "or") return b;
    if (e.name == "==") return Value{chat::equal(a, b)};
    if (e.name == "!=") return Value{!chat::equal(a, b)};
    if (e.name == "in" || e.name == "not in") {
      ECHO_ASSIGN(const bool is_inside, contains(b, a));
      return Value{is_inside == (e.name == "in")};
    }
    const auto *a_text = a.as<std::string>(), *b_text = b.as<std::string>();
    if (e.name == "~") {
      ECHO_ASSIGN(const std::string left, text_of(a));
      ECHO_ASSIGN(const std::string right, text_of(b));
      return make_text(left + right);
    }
    if (e.name == "+" && a_text && b_text) return make_text(*a_text + *b_text);
    if (e.name == "+" && a.list() && b.list()) {
      List concatenation = *a.list();
      concatenation.insert(concatenation.end(), b.list()->begin(), b.list()->end());
      ECHO_TRY(charge_bytes(concatenation.size() * sizeof(Value)));
      return chat::make_list(std::move(concatenation));
    }
    if (a_text && b_text && (e.name.front() == '<' || e.name.front() == '>'))
      return Value{comparison_holds(e.name, a_text->compare(*b_text), 0)};
    // Booleans are no numbers here, unlike in Python.
    const auto number = [](const Value& v) -> std::optional<double> {
      if (const auto* i = v.as<Integer>()) return static_cast<double>(*i);
      if (const auto* d = v.as<double>()) return *d;
      return std::nullopt;
    };
    const auto a_number = number(a), b_number = number(b);
    if (!a_number || !b_number) return template_error("cannot compute {} {} {}", chat::kind(a), e.name, chat::kind(b));
    if (e.name.front() == '<' || e.name.front() == '>') return Value{comparison_holds(e.name, *a_number, *b_number)};
    if (e.name == "/" && *b_number != 0) return Value{*a_number / *b_number};
    const auto *a_integer = a.as<Integer>(), *b_integer = b.as<Integer>();
    if (!a_integer || !b_integer) {
      if (e.name == "+") return Value{*a_number + *b_number};
      if (e.name == "-") return Value{*a_number - *b_number};
      if (e.name == "*") return Value{*a_number * *b_number};
      return template_error("'{}' of floats is not implemented", e.name);
    }
    Integer result = 0;
    bool overflow = false;
    if (e.name == "+") overflow = __builtin_add_overflow(*a_integer, *b_integer, &result);
    if (e.name == "-") overflow = __builtin_sub_overflow(*a_integer, *b_integer, &result);
    if (e.name == "*") overflow = __builtin_mul_overflow(*a_integer, *b_integer, &result);
    if (e.name == "//" || e.name == "%" || e.name == "/") {  // rounded down, as in Python; "/" only by 0 here
      if (*b_integer == 0) return template_error("division by zero");
      if (*a_integer == INT64_MIN && *b_integer == -1) return template_error("integer overflow in '{}'", e.name);
      const Integer remainder = *a_integer % *b_integer,
                    round_down = remainder != 0 && (remainder < 0) != (*b_integer < 0) ? 1 : 0;
      result = e.name == "//" ? *a_integer / *b_integer - round_down : remainder + round_down * *b_integer;
    }
    if (overflow) return template_error("integer overflow in '{}'", e.name);
    return Value{result};
  }

  template <class T>
  static bool comparison_holds(std::string_view comparison, const T& a, const T& b) {
    if (comparison == "<") return a < b;
    if (comparison == ">") return a > b;
    return comparison == "<=" ? a <= b : a >= b;
  }

  Result<bool> contains(const Value& container, const Value& item) const {
    if (const auto* text = container.as<std::string>()) {
      if (const auto* piece = item.as<std::string>()) return text->find(*piece) != std::string::npos;
      return template_error("cannot look for {} in a string", chat::kind(item));
    }
    if (const List* list = container.list())
      return std::any_of(list->begin(), list->end(), [&](const Value& element) { return chat::equal(element, item); });
    if (const Dict* dict = container.dict())
      return item.as<std::string>() && chat::find(*dict, *item.as<std::string>()) != nullptr;
    if (container.is_undefined()) return false;
    return template_error("cannot look into {}", chat::kind(container));
  }

  Result<Value> eval_test(const Expression& e) {
    ECHO_ASSIGN(const Value value, eval(*e.parts[0]));
    ECHO_ASSIGN(const Arguments arguments, evaluate_parts(e, /*first=*/1));
    line_ = e.line;
    if (!e.keywords.empty()) return template_error("the test 'is {}' with named arguments is not implemented", e.name);
    ECHO_ASSIGN(const bool holds, test_holds(value, e.name, arguments));
    return Value{holds};
  }

  // Whether Jinja's test `value is name(arguments)` holds.
  Result<bool> test_holds(const Value& value, std::string_view name, std::span<const Value> arguments) const {
    if (arguments.empty()) {
      if (name == "defined") return !value.is_undefined();
      if (name == "undefined") return value.is_undefined();
      if (name == "none") return value.as<None>() != nullptr;
      if (name == "string") return value.as<std::string>() != nullptr;
      if (name == "mapping") return value.dict() != nullptr;
      if (name == "iterable" || name == "sequence")
        return value.list() != nullptr || value.dict() != nullptr || value.as<std::string>() != nullptr ||
               (value.is_undefined() && name == "iterable");
      if (name == "boolean") return value.as<bool>() != nullptr;
      if (name == "true") return value.as<bool>() && *value.as<bool>();
      if (name == "false") return value.as<bool>() && !*value.as<bool>();
      // As in Jinja, a boolean is a number, but no integer.
      if (name == "integer") return value.as<Integer>() != nullptr;
      if (name == "number") return value.as<Integer>() || value.as<double>() || value.as<bool>();
    } else if (arguments.size() == 1) {
      if (name == "equalto" || name == "eq") return chat::equal(value, arguments[0]);
      if (name == "ne") return !chat::equal(value, arguments[0]);
      if (name == "in") return contains(arguments[0], value);
    }
    return template_error("the test 'is {}'{} is not implemented", name.substr(0, kNameBytesShown),
                          arguments.empty() ? "" : " with arguments");
  }

  Result<Value> eval_filter(const Expression& e) {
    ECHO_ASSIGN(const Value value, eval(*e.parts[0]));
    ECHO_ASSIGN(const Arguments arguments, evaluate_parts(e, /*first=*/1));
    line_ = e.line;
    const std::size_t count = arguments.size();
    if (e.keywords.empty()) {
      if (e.name == "default" && (count == 1 || count == 2)) {
        // default(VALUE, true) also replaces values that count as false.
        const bool uses_default =
            value.is_undefined() || (count == 2 && chat::is_truthy(arguments[1]) && !chat::is_truthy(value));
        return uses_default ? arguments[0] : value;
      }
      if (e.name == "join" && count <= 1) {
        std::string out;
        ECHO_ASSIGN(const List items, items_of(value));
        ECHO_ASSIGN(const std::string separator, text_of(count == 1 ? arguments[0] : Value{std::string()}));
        for (std::size_t i = 0; i < items.size(); ++i) {
          ECHO_ASSIGN(const std::string text, text_of(items[i]));
          ECHO_TRY(charge_bytes(text.size() + separator.size()));
          out += (i > 0 ? separator : "") + text;
        }
        return Value{std::move(out)};
      }
    }
    if ((e.name == "map" || e.name == "selectattr" || e.name == "rejectattr") && count > 0)
      return map_or_select(value, e, arguments);
    if (e.name == "replace" && count == 2 && e.keywords.empty()) {
      ECHO_ASSIGN(const std::string text, text_of(value));
      return call_method(text, "replace", arguments);
    }
    if (count == 0) {
      if (e.name == "tojson") {
        auto json = chat::to_json(value);
        if (!json) return with_line(json.error());
        return make_text(*std::move(json));
      }
      if (e.name == "length" || e.name == "count") {
        if (const auto* text = value.as<std::string>())
          return Value{static_cast<Integer>(chat::characters(*text).size())};
        ECHO_ASSIGN(const List items, items_of(value));
        return Value{static_cast<Integer>(items.size())};
      }
      if (e.name == "list") {
        ECHO_ASSIGN(List items, items_of(value));
        return chat::make_list(std::move(items));
      }
      if (e.name == "first" || e.name == "last") {
        ECHO_ASSIGN(const List items, items_of(value));
        if (items.empty()) return Value{Undefined{e.name}};
        return e.name == "first" ? items.front() : items.back();
      }
      if (e.name == "items" && (value.dict() || value.is_undefined())) return entries(value.dict());
      if (e.name == "dictsort" && value.dict()) return sorted_entries(*value.dict());
      if (e.name == "trim" || e.name == "upper" || e.name == "lower" || e.name == "capitalize" || e.name == "string" ||
          e.name == "safe") {
        ECHO_ASSIGN(std::string text, text_of(value));
        if (e.name == "string" || e.name == "safe") return make_text(std::move(text));
        return call_method(text, e.name == "trim" ? "strip" : e.name, {});
      }
    }
    return template_error("the filter '{}'{} is not implemented for {}", e.name.substr(0, kNameBytesShown),
                          count > 0 ? " with these arguments" : "", chat::kind(value));
  }

  // The filters map(attribute='NAME'), and selectattr or rejectattr('NAME'[, 'TEST'[, ARGUMENT]]).
  Result<Value> map_or_select(const Value& value, const Expression& e, const Arguments& arguments) {
    const bool is_map = e.name == "map";
    const bool are_keywords_known = is_map ? e.keywords == std::vector<std::string>{"attribute"} : e.keywords.empty();
    const auto* name = arguments[0].as<std::string>();
    const auto* test_name = arguments.size() > 1 ? arguments[1].as<std::string>() : nullptr;
    if (!are_keywords_known || !name || arguments.size() > (is_map ? 1u : 3u) || (arguments.size() > 1 && !test_name))
      return template_error("the filter '{}' with these arguments is not implemented", e.name);
    ECHO_ASSIGN(const List items, items_of(value));
    List selected;
    for (const Value& item : items) {
      ECHO_TRY(charge_step(e.line));
      ECHO_ASSIGN(Value property, attribute_of(item, *name));
      if (is_map) {
        selected.push_back(std::move(property));
        continue;
      }
      bool holds = chat::is_truthy(property);
      if (test_name) {
        ECHO_ASSIGN(holds, test_holds(property, *test_name, std::span(arguments).subspan(2)));
      }
      if (holds == (e.name == "selectattr")) selected.push_back(item);
    }
    return chat::make_list(std::move(selected));
  }

  // The entries sorted by key without regard to case, as Jinja's dictsort does.
  static Value sorted_entries(Dict dict) {
    const auto folded = [](const std::string& key) {
      std::string out = key;
      for (char& c : out) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      return out;
    };
    std::ranges::stable_sort(dict, {}, [&](const auto& entry) { return folded(entry.first); });
    return entries(&dict);
  }

  // The list of [key, value] pairs; empty for a null dict.
  static Value entries(const Dict* dict) {
    List pairs;
    for (const auto& [key, value] : dict ? *dict : Dict()) pairs.push_back(chat::make_list({Value{key}, value}));
    return chat::make_list(std::move(pairs));
  }

  Result<Value> eval_call(const Expression& e) {
    const Expression& callee = *e.parts[0];
    if (callee.kind == Kind::kAttribute) {
      ECHO_ASSIGN(const Value object, eval(*callee.parts[0]));
      ECHO_ASSIGN(const Arguments arguments, evaluate_parts(e, /*first=*/1));
      line_ = e.line;
      if (!e.keywords.empty())
        return template_error("the method '{}' with named arguments is not implemented", callee.name);
      if (const auto* text = object.as<std::string>()) return call_method(*text, callee.name, arguments);
      if (const Dict* dict = object.dict()) return call_method(*dict, callee.name, arguments);
      return template_error("the method '{}' of {} is not implemented", callee.name.substr(0, kNameBytesShown),
                            chat::kind(object));
    }
    ECHO_ASSIGN(const Arguments arguments, evaluate_parts(e, /*first=*/1));
    line_ = e.line;
    const std::string name = callee.kind == Kind::kName ? callee.name : "";
    if (name == "namespace" && arguments.size() == e.keywords.size()) {
      Dict dict;
      for (std::size_t i = 0; i < arguments.size(); ++i) chat::set_entry(dict, e.keywords[i], arguments[i]);
      Value space = chat::make_dict(std::move(dict));
      ECHO_TRY(check_nesting(space, /*depth=*/0, /*inside_namespace=*/true));
      namespaces_.insert(space.dict());
      namespace_values_.push_back(space);
      return space;
    }
    if (const auto macro = macros_.find(name); macro != macros_.end())
      return call_macro(*macro->second, arguments, e.keywords);
    if (name == "range" && e.keywords.empty()) return integers_in_range(arguments);
    if (name == "strftime_now" && arguments.size() == 1) return formatted_date(arguments[0]);
    if (name == "raise_exception" && arguments.size() == 1) {
      ECHO_ASSIGN(const std::string message, text_of(arguments[0]));
      constexpr std::size_t kMessageBytesShown = 1000;
      return template_error("the template refuses these messages: {}", message.substr(0, kMessageBytesShown));
    }
    return template_error(
        "the function '{}' is not implemented; known: namespace, raise_exception, range, strftime_now",
        name.substr(0, kNameBytesShown));
  }

  // The list of Python's range(end), range(begin, end) or range(begin, end, step).
  Result<Value> integers_in_range(const Arguments& arguments) {
    std::vector<Integer> numbers;
    for (const Value& argument : arguments)
      if (const auto* number = argument.as<Integer>()) numbers.push_back(*number);
    if (numbers.size() != arguments.size() || numbers.empty() || numbers.size() > 3)
      return template_error("expected one to three integers in range()");
    const Integer begin = numbers.size() == 1 ? 0 : numbers[0], end = numbers.size() == 1 ? numbers[0] : numbers[1];
    const Integer stride = numbers.size() == 3 ? numbers[2] : 1;
    if (stride == 0) return template_error("the step of range() is 0");
    List items;
    for (Integer i = begin; stride > 0 ? i < end : i > end;) {
      ECHO_TRY(charge_step(line_));
      items.push_back({i});
      if (__builtin_add_overflow(i, stride, &i)) break;  // the next number is beyond every end
    }
    return chat::make_list(std::move(items));
  }

  // Calls a macro; its output is the value of the call. It sees only its parameters and the template's outermost
  // variables. `keywords`: the names of the last arguments; those before them have none.
  Result<Value> call_macro(const Statement& macro, const Arguments& arguments,
                           const std::vector<std::string>& keywords) {
    const std::string& name = macro.targets.front();  // the parameters follow it
    const std::size_t parameter_count = macro.targets.size() - 1, positional = arguments.size() - keywords.size();
    if (positional > parameter_count)
      return template_error("the macro '{}' has {} parameters, found {} arguments", name, parameter_count, positional);
    std::vector<Dict> scopes_of_caller;  // hidden from the macro, and restored after it
    std::move(scopes_.begin() + 1, scopes_.end(), std::back_inserter(scopes_of_caller));
    scopes_.resize(1);
    const auto result = [&]() -> Result<std::string> {
      const Scope scope(scopes_);
      for (std::size_t i = 0; i < parameter_count; ++i) {
        const std::string& parameter = macro.targets[i + 1];
        const auto keyword = std::ranges::find(keywords, parameter);
        const std::size_t first_default = parameter_count - macro.defaults.size();
        Value value{Undefined{parameter}};
        if (i < positional) {
          value = arguments[i];
        } else if (keyword != keywords.end()) {
          value = arguments[positional + static_cast<std::size_t>(keyword - keywords.begin())];
        } else if (i >= first_default) {
          ECHO_ASSIGN(value, eval(*macro.defaults[i - first_default]));
        }
        chat::set_entry(scopes_.back(), parameter, std::move(value));
      }
      return output_of(macro.branches[0].body);
    }();
    std::ranges::move(scopes_of_caller, std::back_inserter(scopes_));
    if (!result) return result.error();
    for (const std::string& keyword : keywords)
      if (std::ranges::find(macro.targets.begin() + 1, macro.targets.end(), keyword) == macro.targets.end())
        return template_error("the macro '{}' has no parameter '{}'", name, keyword);
    return Value{*result};
  }

  // Formats the date that the variable strftime_now holds, as C's strftime does.
  Result<Value> formatted_date(const Value& format) const {
    const Value* date = find_variable("strftime_now");
    const auto* date_text = date ? date->as<std::string>() : nullptr;
    const auto* format_text = format.as<std::string>();
    std::tm time{};
    const char* end = date_text ? ::strptime(date_text->c_str(), "%Y-%m-%d", &time) : nullptr;
    if (!end || *end != '\0')
      return template_error(
          "the template asks for the present date, but a prompt must be the same everywhere and at any time: set "
          "task.chat_options: {{strftime_now: \"YYYY-MM-DD\"}}");
    constexpr std::size_t kFormatBytesMax = 100, kDateBytesMax = 1000;
    if (!format_text || format_text->size() > kFormatBytesMax)
      return template_error("expected a format of at most {} bytes in strftime_now()", kFormatBytesMax);
    if (format_text->empty()) return Value{std::string()};
    std::string text(kDateBytesMax, '\0');
    text.resize(std::strftime(text.data(), text.size(), format_text->c_str(), &time));
    return Value{std::move(text)};
  }

  Result<Value> call_method(const std::string& text, std::string_view name, const Arguments& arguments) {
    std::vector<std::string> texts;
    for (const Value& argument : arguments)
      if (const auto* s = argument.as<std::string>()) texts.push_back(*s);
    const std::size_t count = arguments.size();
    if (texts.size() == count) {
      if (name == "startswith" && count == 1) return Value{text.starts_with(texts[0])};
      if (name == "endswith" && count == 1) return Value{text.ends_with(texts[0])};
      if ((name == "strip" || name == "lstrip" || name == "rstrip") && count <= 1)
        return make_text(
            chat::strip(text, /*left=*/name != "rstrip", /*right=*/name != "lstrip", count == 1 ? &texts[0] : nullptr));
      if (name == "split" && count <= 1) return split_text(text, count == 1 ? &texts[0] : nullptr);
      if ((name == "upper" || name == "lower" || name == "capitalize") && count == 0) {
        std::string out = text;
        for (std::size_t i = 0; i < out.size(); ++i) {
          const auto c = static_cast<unsigned char>(out[i]);
          if (c >= 0x80) return template_error("'{}' is implemented for ASCII only", name);
          const bool is_upper = name == "upper" || (name == "capitalize" && i == 0);
          out[i] = static_cast<char>(is_upper ? std::toupper(c) : std::tolower(c));
        }
        return make_text(std::move(out));
      }
      if (name == "replace" && count == 2 && !texts[0].empty()) {
        std::string out;
        std::size_t begin = 0;
        for (std::size_t match; (match = text.find(texts[0], begin)) != std::string::npos;
             begin = match + texts[0].size()) {
          ECHO_TRY(charge_bytes(match - begin + texts[1].size()));
          out += text.substr(begin, match - begin) + texts[1];
        }
        return make_text(out + text.substr(begin));
      }
    }
    return template_error("the method '{}' of a string{} is not implemented", name.substr(0, kNameBytesShown),
                          count > 0 ? " with these arguments" : "");
  }

  // Python's str.split(). `separator` null: splits at white space.
  Result<Value> split_text(const std::string& text, const std::string* separator) {
    ECHO_TRY(charge_bytes(text.size()));
    List parts;
    if (separator) {
      if (separator->empty()) return template_error("split() by an empty string");
      std::size_t begin = 0;
      for (std::size_t match; (match = text.find(*separator, begin)) != std::string::npos;
           begin = match + separator->size())
        parts.push_back({text.substr(begin, match - begin)});
      parts.push_back({text.substr(begin)});
      return chat::make_list(std::move(parts));
    }
    std::string part;
    for (const std::string_view c : chat::characters(text)) {
      if (!chat::strip(c, /*left=*/true, /*right=*/false).empty()) {
        part += c;
      } else if (!part.empty()) {
        parts.push_back({std::move(part)});
        part.clear();
      }
    }
    if (!part.empty()) parts.push_back({std::move(part)});
    return chat::make_list(std::move(parts));
  }

  Result<Value> call_method(const Dict& dict, std::string_view name, const Arguments& arguments) const {
    const auto* key = arguments.empty() ? nullptr : arguments[0].as<std::string>();
    if (name == "items" && arguments.empty()) return entries(&dict);
    if ((name == "keys" || name == "values") && arguments.empty()) {
      List parts;
      for (const auto& [k, value] : dict) parts.push_back(name == "keys" ? Value{k} : value);
      return chat::make_list(std::move(parts));
    }
    if (name == "get" && key && arguments.size() <= 2) {
      if (const Value* value = chat::find(dict, *key)) return *value;
      return arguments.size() == 2 ? arguments[1] : Value{None{}};
    }
    return template_error("the method '{}' of a mapping is not implemented", name.substr(0, kNameBytesShown));
  }

  std::vector<Dict> scopes_;  // variables, outermost scope first
  std::unordered_set<const Dict*> namespaces_;
  std::vector<Value> namespace_values_;  // keeps all namespaces alive, so that addresses in namespaces_ stay unique
  std::map<std::string, const Statement*, std::less<>> macros_;
  std::string out_;
  // The line of the current statement or expression, for messages. Evaluating a part of an expression changes it, so it
  // is set again afterwards.
  std::size_t line_ = 0;
  std::size_t steps_ = 0, bytes_ = 0, depth_ = 0;
};

}  // namespace

Result<ChatTemplate> ChatTemplate::parse(std::string_view text) {
  ECHO_ASSIGN(auto body, chat::parse_template(text));
  auto tree = std::make_shared<Tree>();
  tree->body = std::move(body);
  return ChatTemplate(std::move(tree));
}

Result<std::string> ChatTemplate::render(const std::vector<ChatMessage>& messages, bool add_generation_prompt,
                                         std::string_view variables_json) const {
  Dict variables;
  if (!variables_json.empty()) {
    const auto json = nlohmann::ordered_json::parse(variables_json, nullptr, /*allow_exceptions=*/false);
    if (!json.is_object())
      return fail(Code::kInvalid, kErrorSource, "expected a JSON object of variables, found {}",
                  variables_json.substr(0, 80));
    for (const auto& [name, value] : json.items()) variables.emplace_back(name, chat::from_json(value));
  }
  List message_list;
  for (const ChatMessage& message : messages)
    message_list.push_back(chat::make_dict({{"role", {message.role}}, {"content", {message.content}}}));
  chat::set_entry(variables, "messages", chat::make_list(std::move(message_list)));
  chat::set_entry(variables, "add_generation_prompt", {add_generation_prompt});
  for (const char* absent : {"tools", "documents"})  // Hugging Face defines these names even if there are none
    if (!chat::find(variables, absent)) variables.emplace_back(absent, Value{None{}});
  return Renderer(std::move(variables)).render(tree_->body);
}

}  // namespace echoline::model
