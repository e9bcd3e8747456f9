// Evaluates the tree of a chat template (template_syntax.hpp), and bounds its steps, memory and depth.
#include "model/chat_template.hpp"

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>
#include <optional>
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
constexpr std::size_t kBytesMax = 256u << 20;  // all texts and lists created
constexpr std::size_t kNestingMax = 64;        // of lists and mappings in a variable, which are freed recursively
constexpr std::string_view kErrorSource = "chat template";

using Integer = std::int64_t;
using Kind = Expression::Kind;
using Arguments = std::vector<Value>;

class Renderer {
 public:
  explicit Renderer(Dict variables) { scopes_.push_back(std::move(variables)); }

  Result<std::string> render(const std::vector<Statement>& body) {
    ECHO_TRY(run(body));
    return std::move(out_);
  }

 private:
  enum class Flow { kNormal, kBreak, kContinue };

  template <class... Args>
  Error bad(fmt::format_string<Args...> format, Args&&... args) const {
    return fail(Code::kInvalid, kErrorSource, "line {}: {}", line_, fmt::format(format, std::forward<Args>(args)...));
  }
  // Errors of template_value.hpp have no line.
  Error with_line(const Error& error) const { return bad("{}", error.detail); }

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

  Result<Flow> run(const std::vector<Statement>& body) {
    for (const Statement& s : body) {
      ECHO_TRY(charge_step(s.line));
      switch (s.kind) {
        case Statement::Kind::kText:
          ECHO_TRY(charge_bytes(s.text.size()));
          out_ += s.text;
          break;
        case Statement::Kind::kOutput: {
          ECHO_ASSIGN(const Value value, eval(*s.expression));
          ECHO_ASSIGN(const std::string text, text_of(value));
          ECHO_TRY(charge_bytes(text.size()));
          out_ += text;
          break;
        }
        case Statement::Kind::kSet:
          ECHO_TRY(set(s));
          break;
        case Statement::Kind::kBreak:
          return Flow::kBreak;
        case Statement::Kind::kContinue:
          return Flow::kContinue;
        case Statement::Kind::kIf:
          for (const Statement::Branch& branch : s.branches) {
            bool holds = true;
            if (branch.condition) {
              ECHO_ASSIGN(const Value condition, eval(*branch.condition));
              holds = chat::is_truthy(condition);
            }
            if (!holds) continue;
            ECHO_ASSIGN(const Flow flow, run(branch.body));
            if (flow != Flow::kNormal) return flow;
            break;
          }
          break;
        case Statement::Kind::kFor: {
          ECHO_ASSIGN(const Flow flow, loop(s));
          if (flow != Flow::kNormal) return flow;
          break;
        }
      }
    }
    return Flow::kNormal;
  }

  Status set(const Statement& s) {
    ECHO_ASSIGN(Value value, eval(*s.expression));
    line_ = s.line;
    ECHO_TRY(check_nesting(value, 0, !s.attribute.empty()));
    if (s.attribute.empty()) {
      chat::set_entry(scopes_.back(), s.targets.front(), std::move(value));
      return ok();
    }
    const Value* target = lookup(s.targets.front());
    Dict* space = target ? target->dict() : nullptr;
    if (!space || !namespaces_.contains(space))
      return bad("cannot set '{0}.{1}': '{0}' is not a namespace", s.targets.front(), s.attribute);
    chat::set_entry(*space, s.attribute, std::move(value));
    return ok();
  }

  // Refuses a namespace inside a namespace, because it could contain itself, and values that are nested too deep.
  Status check_nesting(const Value& value, std::size_t depth, bool inside_namespace) {
    ECHO_TRY(charge_bytes(sizeof(Value)));
    if (depth > kNestingMax) return bad("lists and mappings are nested more than {} deep", kNestingMax);
    if (const List* list = value.list())
      for (const Value& item : *list) ECHO_TRY(check_nesting(item, depth + 1, inside_namespace));
    if (const Dict* dict = value.dict()) {
      if (inside_namespace && namespaces_.contains(dict))
        return bad("a namespace inside a namespace is not implemented");
      for (const auto& [key, item] : *dict) ECHO_TRY(check_nesting(item, depth + 1, inside_namespace));
    }
    return ok();
  }

  Status bind_targets(const Statement& s, const Value& item) {
    if (s.targets.size() == 1) {
      chat::set_entry(scopes_.back(), s.targets.front(), item);
      return ok();
    }
    const List* parts = item.list();
    if (!parts || parts->size() != s.targets.size())
      return bad("cannot take {} loop variables from {}", s.targets.size(), chat::kind(item));
    for (std::size_t i = 0; i < parts->size(); ++i) chat::set_entry(scopes_.back(), s.targets[i], (*parts)[i]);
    return ok();
  }

  // Drops the variables of a loop at its end.
  struct Scope {
    explicit Scope(std::vector<Dict>& scopes) : scopes_(scopes) { scopes_.emplace_back(); }
    ~Scope() { scopes_.pop_back(); }

   private:
    std::vector<Dict>& scopes_;
  };

  Result<Flow> loop(const Statement& s) {
    ECHO_ASSIGN(const Value iterable, eval(*s.expression));
    ECHO_ASSIGN(List items, items_of(iterable));
    if (s.condition) {
      List matching;
      for (Value& item : items) {
        const Scope scope(scopes_);
        ECHO_TRY(bind_targets(s, item));
        ECHO_ASSIGN(const Value condition, eval(*s.condition));
        if (chat::is_truthy(condition)) matching.push_back(std::move(item));
      }
      items = std::move(matching);
    }
    if (items.empty()) {
      const Scope scope(scopes_);
      return run(s.branches[1].body);
    }
    const auto length = static_cast<Integer>(items.size());
    for (Integer i = 0; i < length; ++i) {
      ECHO_TRY(charge_step(s.line));
      const Scope scope(scopes_);
      const auto index = static_cast<std::size_t>(i);
      Dict loop_variables{{"index", {i + 1}},         {"index0", {i}},
                          {"revindex", {length - i}}, {"revindex0", {length - i - 1}},
                          {"first", {i == 0}},        {"last", {i + 1 == length}},
                          {"length", {length}}};
      if (i > 0) loop_variables.emplace_back("previtem", items[index - 1]);
      if (i + 1 < length) loop_variables.emplace_back("nextitem", items[index + 1]);
      chat::set_entry(scopes_.back(), "loop", chat::make_dict(std::move(loop_variables)));
      ECHO_TRY(bind_targets(s, items[index]));
      ECHO_ASSIGN(const Flow flow, run(s.branches[0].body));
      if (flow == Flow::kBreak) break;
    }
    return Flow::kNormal;
  }

  const Value* lookup(std::string_view name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope)
      if (const Value* value = chat::find(*scope, name)) return value;
    return nullptr;
  }

  Result<std::string> text_of(const Value& value) const {
    auto text = chat::text(value);
    if (!text) return with_line(text.error());
    return text;
  }

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
    return bad("cannot go through {}", chat::kind(value));
  }

  Result<Value> eval(const Expression& e) {
    ECHO_TRY(charge_step(e.line));
    switch (e.kind) {
      case Kind::kLiteral:
        return e.value;
      case Kind::kName: {
        const Value* value = lookup(e.name);
        return value ? *value : Value{Undefined{e.name}};
      }
      case Kind::kList: {
        ECHO_ASSIGN(Arguments items, evaluate_parts(e, 0));
        return chat::make_list(std::move(items));
      }
      case Kind::kMapping: {
        ECHO_ASSIGN(Arguments items, evaluate_parts(e, 0));
        Dict dict;
        for (std::size_t i = 0; i + 1 < items.size(); i += 2) {
          const auto* key = items[i].as<std::string>();
          if (!key) return bad("the key of a mapping is {}, expected a string", chat::kind(items[i]));
          chat::set_entry(dict, *key, items[i + 1]);
        }
        return chat::make_dict(std::move(dict));
      }
      case Kind::kAttribute: {
        ECHO_ASSIGN(const Value object, eval(*e.parts[0]));
        return attribute(object, e.name);
      }
      case Kind::kIndex: {
        ECHO_ASSIGN(const Value object, eval(*e.parts[0]));
        ECHO_ASSIGN(const Value index, eval(*e.parts[1]));
        return element(object, index);
      }
      case Kind::kSlice:
        return slice(e);
      case Kind::kCall:
        return call(e);
      case Kind::kFilter:
        return filter(e);
      case Kind::kTest:
        return test(e);
      case Kind::kNot: {
        ECHO_ASSIGN(const Value value, eval(*e.parts[0]));
        return Value{!chat::is_truthy(value)};
      }
      case Kind::kNegative: {
        ECHO_ASSIGN(const Value value, eval(*e.parts[0]));
        if (const auto* i = value.as<Integer>(); i && *i != INT64_MIN) return Value{-*i};
        if (const auto* d = value.as<double>()) return Value{-*d};
        return bad("cannot negate {}", chat::kind(value));
      }
      case Kind::kBinary:
        return binary(e);
      case Kind::kConditional: {
        ECHO_ASSIGN(const Value condition, eval(*e.parts[0]));
        if (chat::is_truthy(condition)) return eval(*e.parts[1]);
        return e.parts[2] ? eval(*e.parts[2]) : Value{Undefined{"the missing else"}};
      }
    }
    return bad("unknown expression");
  }

  Result<Arguments> evaluate_parts(const Expression& e, std::size_t first) {
    Arguments values;
    for (std::size_t i = first; i < e.parts.size(); ++i) {
      ECHO_ASSIGN(Value value, eval(*e.parts[i]));
      values.push_back(std::move(value));
    }
    return values;
  }

  Result<Value> attribute(const Value& object, const std::string& name) const {
    if (object.is_undefined()) return bad("cannot take '.{}' of {}", name, chat::kind(object));
    if (const Dict* dict = object.dict())
      if (const Value* value = chat::find(*dict, name)) return *value;
    return Value{Undefined{name}};
  }

  Result<Value> element(const Value& object, const Value& index) const {
    if (const auto* key = index.as<std::string>()) return attribute(object, *key);
    const auto* i = index.as<Integer>();
    const List* list = object.list();
    const auto* text = object.as<std::string>();
    if (!i || (!list && !text)) return bad("cannot index {} with {}", chat::kind(object), chat::kind(index));
    const auto text_characters = text ? chat::characters(*text) : std::vector<std::string_view>();
    const auto size = static_cast<Integer>(list ? list->size() : text_characters.size());
    const Integer position = *i < 0 ? *i + size : *i;
    if (position < 0 || position >= size) return Value{Undefined{fmt::format("element {}", *i)}};
    return list ? (*list)[static_cast<std::size_t>(position)]
                : Value{std::string(text_characters[static_cast<std::size_t>(position)])};
  }

  Result<Value> slice(const Expression& e) {
    ECHO_ASSIGN(const Value object, eval(*e.parts[0]));
    std::optional<Integer> bounds[3];
    for (std::size_t i = 0; i < 3; ++i) {
      if (!e.parts[i + 1]) continue;
      ECHO_ASSIGN(const Value bound, eval(*e.parts[i + 1]));
      if (bound.as<None>()) continue;
      if (!bound.as<Integer>()) return bad("a bound of a slice is {}, expected an integer", chat::kind(bound));
      bounds[i] = *bound.as<Integer>();
    }
    const auto* text = object.as<std::string>();
    if (!text && !object.list()) return bad("cannot slice {}", chat::kind(object));
    ECHO_ASSIGN(const List items, items_of(object));
    const auto size = static_cast<Integer>(items.size());
    const Integer stride = bounds[2].value_or(1);
    if (stride == 0) return bad("the step of a slice is 0");
    const Integer lowest = stride > 0 ? 0 : -1, highest = stride > 0 ? size : size - 1;
    const auto resolve = [&](std::optional<Integer> bound, Integer if_absent) {
      if (!bound) return if_absent;
      if (*bound < -size) return lowest;
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

  Result<Value> binary(const Expression& e) {
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
    const auto *s = a.as<std::string>(), *t = b.as<std::string>();
    if (e.name == "~") {
      ECHO_ASSIGN(const std::string left, text_of(a));
      ECHO_ASSIGN(const std::string right, text_of(b));
      return make_text(left + right);
    }
    if (e.name == "+" && s && t) return make_text(*s + *t);
    if (e.name == "+" && a.list() && b.list()) {
      List concatenation = *a.list();
      concatenation.insert(concatenation.end(), b.list()->begin(), b.list()->end());
      ECHO_TRY(charge_bytes(concatenation.size() * sizeof(Value)));
      return chat::make_list(std::move(concatenation));
    }
    if (s && t && (e.name.front() == '<' || e.name.front() == '>')) return Value{ordered(e.name, s->compare(*t), 0)};
    const auto number = [](const Value& v) -> std::optional<double> {
      if (const auto* i = v.as<Integer>()) return static_cast<double>(*i);
      if (const auto* d = v.as<double>()) return *d;
      return std::nullopt;
    };
    const auto x = number(a), y = number(b);
    if (!x || !y) return bad("cannot compute {} {} {}", chat::kind(a), e.name, chat::kind(b));
    if (e.name.front() == '<' || e.name.front() == '>') return Value{ordered(e.name, *x, *y)};
    if (e.name == "/" && *y != 0) return Value{*x / *y};
    const auto *i = a.as<Integer>(), *j = b.as<Integer>();
    if (!i || !j) {
      if (e.name == "+") return Value{*x + *y};
      if (e.name == "-") return Value{*x - *y};
      if (e.name == "*") return Value{*x * *y};
      return bad("'{}' of floats is not implemented", e.name);
    }
    Integer result = 0;
    bool overflow = false;
    if (e.name == "+") overflow = __builtin_add_overflow(*i, *j, &result);
    if (e.name == "-") overflow = __builtin_sub_overflow(*i, *j, &result);
    if (e.name == "*") overflow = __builtin_mul_overflow(*i, *j, &result);
    if (e.name == "//" || e.name == "%" || e.name == "/") {  // rounded down, as in Python
      if (*j == 0) return bad("division by zero");
      if (*i == INT64_MIN && *j == -1) return bad("integer overflow in '{}'", e.name);
      const Integer remainder = *i % *j, round_down = remainder != 0 && (remainder < 0) != (*j < 0) ? 1 : 0;
      result = e.name == "//" ? *i / *j - round_down : remainder + round_down * *j;
    }
    if (overflow) return bad("integer overflow in '{}'", e.name);
    return Value{result};
  }

  template <class T>
  static bool ordered(std::string_view comparison, const T& a, const T& b) {
    if (comparison == "<") return a < b;
    if (comparison == ">") return a > b;
    return comparison == "<=" ? a <= b : a >= b;
  }

  Result<bool> contains(const Value& container, const Value& item) const {
    if (const auto* text = container.as<std::string>()) {
      if (const auto* piece = item.as<std::string>()) return text->find(*piece) != std::string::npos;
      return bad("cannot look for {} in a string", chat::kind(item));
    }
    if (const List* list = container.list())
      return std::any_of(list->begin(), list->end(), [&](const Value& element) { return chat::equal(element, item); });
    if (const Dict* dict = container.dict())
      return item.as<std::string>() && chat::find(*dict, *item.as<std::string>()) != nullptr;
    if (container.is_undefined()) return false;
    return bad("cannot look into {}", chat::kind(container));
  }

  Result<Value> test(const Expression& e) {
    ECHO_ASSIGN(const Value value, eval(*e.parts[0]));
    line_ = e.line;
    if (e.parts.size() == 1) {
      if (e.name == "defined") return Value{!value.is_undefined()};
      if (e.name == "undefined") return Value{value.is_undefined()};
      if (e.name == "none") return Value{value.as<None>() != nullptr};
      if (e.name == "string") return Value{value.as<std::string>() != nullptr};
      if (e.name == "mapping") return Value{value.dict() != nullptr};
      if (e.name == "iterable" || e.name == "sequence")
        return Value{value.list() != nullptr || value.dict() != nullptr || value.as<std::string>() != nullptr ||
                     (value.is_undefined() && e.name == "iterable")};
      if (e.name == "boolean") return Value{value.as<bool>() != nullptr};
      if (e.name == "true") return Value{value.as<bool>() && *value.as<bool>()};
      if (e.name == "false") return Value{value.as<bool>() && !*value.as<bool>()};
      if (e.name == "integer") return Value{value.as<Integer>() != nullptr};
      if (e.name == "number") return Value{value.as<Integer>() || value.as<double>() || value.as<bool>()};
    }
    return bad("the test 'is {}'{} is not implemented", e.name.substr(0, 40),
               e.parts.size() > 1 ? " with arguments" : "");
  }

  Result<Value> filter(const Expression& e) {
    ECHO_ASSIGN(const Value value, eval(*e.parts[0]));
    ECHO_ASSIGN(const Arguments arguments, evaluate_parts(e, 1));
    line_ = e.line;
    const std::size_t count = arguments.size();
    if (e.keywords.empty()) {
      if (e.name == "default" && (count == 1 || count == 2)) {
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
      if (e.name == "trim" || e.name == "upper" || e.name == "lower" || e.name == "string" || e.name == "safe") {
        ECHO_ASSIGN(std::string text, text_of(value));
        if (e.name == "string" || e.name == "safe") return make_text(std::move(text));
        return method(text, e.name == "trim" ? "strip" : e.name, {});
      }
    }
    return bad("the filter '{}'{} is not implemented for {}", e.name.substr(0, 40),
               count > 0 ? " with these arguments" : "", chat::kind(value));
  }

  static Value entries(const Dict* dict) {
    List pairs;
    for (const auto& [key, value] : dict ? *dict : Dict()) pairs.push_back(chat::make_list({Value{key}, value}));
    return chat::make_list(std::move(pairs));
  }

  Result<Value> call(const Expression& e) {
    const Expression& callee = *e.parts[0];
    if (callee.kind == Kind::kAttribute) {
      ECHO_ASSIGN(const Value object, eval(*callee.parts[0]));
      ECHO_ASSIGN(const Arguments arguments, evaluate_parts(e, 1));
      line_ = e.line;
      if (!e.keywords.empty()) return bad("the method '{}' with named arguments is not implemented", callee.name);
      if (const auto* text = object.as<std::string>()) return method(*text, callee.name, arguments);
      if (const Dict* dict = object.dict()) return method(*dict, callee.name, arguments);
      return bad("the method '{}' of {} is not implemented", callee.name.substr(0, 40), chat::kind(object));
    }
    ECHO_ASSIGN(const Arguments arguments, evaluate_parts(e, 1));
    line_ = e.line;
    const std::string name = callee.kind == Kind::kName ? callee.name : "";
    if (name == "namespace" && arguments.size() == e.keywords.size()) {
      Dict dict;
      for (std::size_t i = 0; i < arguments.size(); ++i) chat::set_entry(dict, e.keywords[i], arguments[i]);
      Value space = chat::make_dict(std::move(dict));
      ECHO_TRY(check_nesting(space, 0, true));
      namespaces_.insert(space.dict());
      namespace_values_.push_back(space);
      return space;
    }
    if (name == "raise_exception" && arguments.size() == 1) {
      ECHO_ASSIGN(const std::string message, text_of(arguments[0]));
      return bad("the template refuses these messages: {}", message.substr(0, 1000));
    }
    return bad("the function '{}' is not implemented; known: namespace, raise_exception", name.substr(0, 40));
  }

  Result<Value> method(const std::string& text, std::string_view name, const Arguments& arguments) {
    std::vector<std::string> texts;
    for (const Value& argument : arguments)
      if (const auto* s = argument.as<std::string>()) texts.push_back(*s);
    const std::size_t count = arguments.size();
    if (texts.size() == count) {
      if (name == "startswith" && count == 1) return Value{text.starts_with(texts[0])};
      if (name == "endswith" && count == 1) return Value{text.ends_with(texts[0])};
      if ((name == "strip" || name == "lstrip" || name == "rstrip") && count <= 1)
        return make_text(chat::strip(text, name != "rstrip", name != "lstrip", count == 1 ? &texts[0] : nullptr));
      if (name == "split" && count <= 1) return split(text, count == 1 ? &texts[0] : nullptr);
      if ((name == "upper" || name == "lower") && count == 0) {
        std::string out = text;
        for (char& c : out) {
          if (static_cast<unsigned char>(c) >= 0x80) return bad("'{}' is implemented for ASCII only", name);
          c = static_cast<char>(name == "upper" ? std::toupper(c) : std::tolower(c));
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
    return bad("the method '{}' of a string{} is not implemented", name.substr(0, 40),
               count > 0 ? " with these arguments" : "");
  }

  Result<Value> split(const std::string& text, const std::string* separator) {
    ECHO_TRY(charge_bytes(text.size()));
    List parts;
    if (separator) {
      if (separator->empty()) return bad("split() by an empty string");
      std::size_t begin = 0;
      for (std::size_t match; (match = text.find(*separator, begin)) != std::string::npos;
           begin = match + separator->size())
        parts.push_back({text.substr(begin, match - begin)});
      parts.push_back({text.substr(begin)});
      return chat::make_list(std::move(parts));
    }
    std::string part;
    for (const std::string_view c : chat::characters(text)) {
      if (!chat::strip(c, true, false).empty()) {
        part += c;
      } else if (!part.empty()) {
        parts.push_back({std::move(part)});
        part.clear();
      }
    }
    if (!part.empty()) parts.push_back({std::move(part)});
    return chat::make_list(std::move(parts));
  }

  Result<Value> method(const Dict& dict, std::string_view name, const Arguments& arguments) const {
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
    return bad("the method '{}' of a mapping is not implemented", name.substr(0, 40));
  }

  std::vector<Dict> scopes_;
  std::unordered_set<const Dict*> namespaces_;
  std::vector<Value> namespace_values_;  // all namespaces, so that no address is reused
  std::string out_;
  std::size_t line_ = 0, steps_ = 0, bytes_ = 0;
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
    const auto json = nlohmann::ordered_json::parse(variables_json, nullptr, false);
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
