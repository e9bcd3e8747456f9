// Lexer and recursive-descent parser of chat templates: Jinja with its options lstrip_blocks and trim_blocks.
#include "model/template_syntax.hpp"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <utility>

namespace echoline::model::chat {
namespace {

constexpr std::size_t kDepthMax = 200;  // levels of expressions, and of blocks; parsing and evaluation recurse as deep
constexpr std::size_t kNameBytesShown = 40;  // of a template's word in an error message

template <class... Args>
Error syntax_error(std::size_t line, fmt::format_string<Args...> format, Args&&... args) {
  return fail(Code::kInvalid, "chat template", "line {}: {}", line, fmt::format(format, std::forward<Args>(args)...));
}

// A token of the template. Its text is the name, the digits, the operator, or the content of the string or text.
struct Token {
  enum class Kind {
    kText,
    kOutputBegin,
    kOutputEnd,
    kTagBegin,
    kTagEnd,
    kName,
    kInteger,
    kFloat,
    kString,
    kOperator,
    kEnd
  };
  Kind kind;
  std::size_t line;
  std::string text;
};

bool is_letter(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }
bool is_digit(char c) { return c >= '0' && c <= '9'; }
bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Appends the code point c.
void append_utf8(std::string& out, std::uint32_t c) {
  if (c < 0x80) {
    out += static_cast<char>(c);
  } else if (c < 0x800) {
    out += static_cast<char>(0xc0 | c >> 6);
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else if (c < 0x10000) {
    out += static_cast<char>(0xe0 | c >> 12);
    out += static_cast<char>(0x80 | (c >> 6 & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  } else {
    out += static_cast<char>(0xf0 | c >> 18);
    out += static_cast<char>(0x80 | (c >> 12 & 0x3f));
    out += static_cast<char>(0x80 | (c >> 6 & 0x3f));
    out += static_cast<char>(0x80 | (c & 0x3f));
  }
}

// Splits the source into text and the tokens between {{ }} and {% %}, without comments. A carriage return, alone or
// before a newline, becomes a newline.
class Lexer {
 public:
  explicit Lexer(std::string_view source) {
    for (std::size_t i = 0; i < source.size(); ++i) {
      const bool is_carriage_return = source[i] == '\r';
      if (is_carriage_return && i + 1 < source.size() && source[i + 1] == '\n') ++i;
      text_ += is_carriage_return ? '\n' : source[i];
    }
    if (text_.ends_with('\n')) text_.pop_back();  // as Jinja without keep_trailing_newline
  }

  Result<std::vector<Token>> lex() {
    while (position_ < text_.size()) {
      std::size_t open = position_;
      while (open < text_.size() && !(text_[open] == '{' && open + 1 < text_.size() &&
                                      (text_[open + 1] == '{' || text_[open + 1] == '%' || text_[open + 1] == '#')))
        ++open;
      if (open == text_.size()) {
        add_text(text_.substr(position_));
        break;
      }
      const char type = text_[open + 1];  // of the tag: '{' for output, '%' for a statement, '#' for a comment
      // '-' removes the white space before the tag; '+' keeps indentation that lstrip_blocks would remove.
      const char sign = open + 2 < text_.size() ? text_[open + 2] : ' ';
      std::string text_before = text_.substr(position_, open - position_);
      if (sign == '-') {
        while (!text_before.empty() && is_blank(text_before.back())) text_before.pop_back();
      } else if (type != '{' && sign != '+') {
        // lstrip_blocks removes the indentation before a tag that begins its line.
        const std::size_t newline = text_before.rfind('\n');
        const std::size_t line_start = newline == std::string::npos ? 0 : newline + 1;
        const bool begins_line = line_start > 0 || at_line_start_;
        if (begins_line && text_before.find_first_not_of(" \t", line_start) == std::string::npos)
          text_before.resize(line_start);
      }
      add_text(text_before);
      advance_to(open + 2 + (sign == '-' || sign == '+' ? 1 : 0));
      if (type == '#') {
        ECHO_TRY(skip_comment());
      } else {
        add(type == '{' ? Token::Kind::kOutputBegin : Token::Kind::kTagBegin, "");
        ECHO_TRY(lex_tag(type));
      }
    }
    add(Token::Kind::kEnd, "");
    return std::move(tokens_);
  }

 private:
  void add(Token::Kind kind, std::string text) {
    tokens_.push_back({.kind = kind, .line = line_, .text = std::move(text)});
  }
  void add_text(const std::string& text) {
    if (!text.empty()) add(Token::Kind::kText, text);
  }
  void advance_to(std::size_t position) {
    for (; position_ < position; ++position_) line_ += text_[position_] == '\n' ? 1 : 0;
  }
  char peek(std::size_t ahead = 0) const { return position_ + ahead < text_.size() ? text_[position_ + ahead] : '\0'; }

  // Skips white space after the end of a tag. `sign` is the character before the end: with '-', skips all white space.
  // Otherwise, after a block or comment, skips one newline (trim_blocks), unless `sign` is '+'.
  void trim_after_tag(char sign, bool is_block) {
    const std::size_t start = position_;
    std::size_t end = position_;
    if (sign == '-')
      while (end < text_.size() && is_blank(text_[end])) ++end;
    else if (is_block && sign != '+' && peek() == '\n')
      ++end;
    advance_to(end);
    at_line_start_ = end > start && text_[end - 1] == '\n';
  }

  Status skip_comment() {
    const std::size_t end = text_.find("#}", position_);
    if (end == std::string::npos) return syntax_error(line_, "a comment is not closed with #}}");
    const char sign = end > position_ ? text_[end - 1] : ' ';
    advance_to(end + 2);
    trim_after_tag(sign, /*is_block=*/true);
    return ok();
  }

  // Appends the tokens up to the end of the tag. `type` is the second character of its opening: '{' or '%'.
  Status lex_tag(char type) {
    const char closing = type == '{' ? '}' : '%';
    const std::size_t first_line = line_;
    std::string closers;  // the closing brackets that are expected, innermost last
    while (true) {
      while (is_blank(peek())) advance_to(position_ + 1);
      if (position_ >= text_.size()) return syntax_error(first_line, "{{{} is not closed", type);
      const char c = peek();
      const std::size_t signs = c == '-' || c == '+' ? 1 : 0;
      if (closers.empty() && peek(signs) == closing && peek(signs + 1) == '}') {
        add(type == '{' ? Token::Kind::kOutputEnd : Token::Kind::kTagEnd, "");
        advance_to(position_ + signs + 2);
        trim_after_tag(signs == 1 ? c : ' ', type == '%');
        return ok();
      }
      if (is_letter(c)) {
        add(Token::Kind::kName, consume_while([](char x) { return is_letter(x) || is_digit(x); }));
      } else if (is_digit(c)) {
        ECHO_TRY(lex_number());
      } else if (c == '\'' || c == '"') {
        ECHO_TRY(lex_string());
      } else {
        ECHO_TRY(lex_symbol(closers));
      }
    }
  }

  // Consumes the next characters as long as belongs(character) is true, and returns them.
  template <class Belongs>
  std::string consume_while(Belongs belongs) {
    std::size_t end = position_;
    while (end < text_.size() && belongs(text_[end])) ++end;
    std::string out = text_.substr(position_, end - position_);
    advance_to(end);
    return out;
  }

  Status lex_number() {
    std::string digits = consume_while(is_digit);
    const bool has_fraction = peek() == '.' && is_digit(peek(1));
    if (has_fraction) {
      advance_to(position_ + 1);
      digits += "." + consume_while(is_digit);
    }
    constexpr std::size_t kDigitsShown = 32;
    if (is_letter(peek()))
      return syntax_error(line_, "malformed number '{}{}'", digits.substr(0, kDigitsShown), peek());
    constexpr std::size_t kDigitsMax = 18;  // fit in a signed 64-bit integer
    if (digits.size() > kDigitsMax)
      return syntax_error(line_, "the number '{}...' is too long", digits.substr(0, kDigitsMax));
    add(has_fraction ? Token::Kind::kFloat : Token::Kind::kInteger, digits);
    return ok();
  }

  Status lex_string() {
    const char quote = peek();
    const std::size_t first_line = line_;
    std::string out;
    advance_to(position_ + 1);
    while (peek() != quote) {
      if (position_ >= text_.size()) return syntax_error(first_line, "a string is not closed with {}", quote);
      if (peek() != '\\') {
        out += peek();
        advance_to(position_ + 1);
        continue;
      }
      const char escaped = peek(1);
      advance_to(std::min(position_ + 2, text_.size()));
      // The value of each escape \NAME.
      static constexpr std::string_view kEscapeNames = "nrtbfva\\'\"\n", kEscapeValues = "\n\r\t\b\f\v\a\\'\"";
      const std::size_t name_index = kEscapeNames.find(escaped);
      const std::size_t digits = escaped == 'x' ? 2 : escaped == 'u' ? 4 : escaped == 'U' ? 8 : 0;
      if (name_index != std::string_view::npos) {
        // The last name, a line break, has no value: a backslash before it continues the line.
        if (name_index < kEscapeValues.size()) out += kEscapeValues[name_index];
      } else if (digits > 0) {
        const std::string hex = text_.substr(position_, digits);
        const bool is_valid =
            hex.size() == digits && hex.find_first_not_of("0123456789abcdefABCDEF") == std::string::npos;
        const unsigned long code = is_valid ? std::strtoul(hex.c_str(), nullptr, 16) : 0;
        const bool is_surrogate = code >= 0xd800 && code < 0xe000;
        if (!is_valid || code > 0x10ffff || is_surrogate)
          return syntax_error(line_, "malformed escape \\{}{}", escaped, hex);
        append_utf8(out, static_cast<std::uint32_t>(code));
        advance_to(position_ + digits);
      } else {
        out += '\\';
        out += escaped;
      }
    }
    advance_to(position_ + 1);
    add(Token::Kind::kString, out);
    return ok();
  }

  // Appends an operator or bracket. `closers`: see lex_tag().
  Status lex_symbol(std::string& closers) {
    for (const std::string_view symbol : {"==", "!=", "<=", ">=", "//", "**"}) {
      if (text_.compare(position_, 2, symbol) != 0) continue;
      add(Token::Kind::kOperator, std::string(symbol));
      advance_to(position_ + 2);
      return ok();
    }
    const char c = peek();
    if (std::string_view("+-*/%~<>=|.,:()[]{}").find(c) == std::string_view::npos)
      return syntax_error(line_, "unexpected character 0x{:02x}", static_cast<unsigned char>(c));
    if (c == '(' || c == '[' || c == '{') closers += c == '(' ? ')' : c == '[' ? ']' : '}';
    if (c == ')' || c == ']' || c == '}') {
      if (closers.empty() || closers.back() != c) return syntax_error(line_, "unexpected '{}'", c);
      closers.pop_back();
    }
    add(Token::Kind::kOperator, std::string(1, c));
    advance_to(position_ + 1);
    return ok();
  }

  std::string text_;
  std::size_t position_ = 0, line_ = 1;  // index in text_ of the next character, and its line
  bool at_line_start_ = true;  // whether the position is the start of the template or follows a skipped newline
  std::vector<Token> tokens_;
};

// Builds the tree from the Lexer's tokens. Each function consumes the tokens of the construct that it parses.
class Parser {
 public:
  using Node = std::unique_ptr<Expression>;
  using Kind = Expression::Kind;
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  Result<std::vector<Statement>> parse() {
    std::string ended_by;
    ECHO_ASSIGN(auto body, parse_statements({}, ended_by));
    return body;
  }

 private:
  // Counts one more level of recursion while it exists.
  struct DepthGuard {
    explicit DepthGuard(std::size_t& depth) : depth_(depth) { ++depth_; }
    ~DepthGuard() { --depth_; }

   private:
    std::size_t& depth_;
  };

  const Token& token() const { return tokens_[position_]; }
  std::size_t line() const { return token().line; }
  bool is_operator(std::string_view symbol) const {
    return token().kind == Token::Kind::kOperator && token().text == symbol;
  }
  bool is_word(std::string_view name) const { return token().kind == Token::Kind::kName && token().text == name; }
  // Goes to the next token, but not beyond the last one, kEnd.
  void advance() { position_ += position_ + 1 < tokens_.size() ? 1 : 0; }
  bool consume(std::string_view symbol) {
    if (!is_operator(symbol)) return false;
    advance();
    return true;
  }
  bool consume_word(std::string_view name) {
    if (!is_word(name)) return false;
    advance();
    return true;
  }
  std::string describe_token() const {
    switch (token().kind) {
      case Token::Kind::kOutputEnd:
        return "}}";
      case Token::Kind::kTagEnd:
        return "%}";
      case Token::Kind::kEnd:
        return "the end of the template";
      default:
        return fmt::format("'{}'", token().text.substr(0, kNameBytesShown));
    }
  }
  Status expect(std::string_view symbol) {
    if (consume(symbol)) return ok();
    return syntax_error(line(), "expected '{}', found {}", symbol, describe_token());
  }
  Result<std::string> expect_name(const char* what) {
    if (token().kind != Token::Kind::kName)
      return syntax_error(line(), "expected {}, found {}", what, describe_token());
    std::string name = token().text;
    advance();
    return name;
  }
  Status expect_tag_end() {
    if (token().kind != Token::Kind::kTagEnd) return syntax_error(line(), "expected %}}, found {}", describe_token());
    advance();
    return ok();
  }

  // Parses statements up to a tag named in `until`, consumes that name and sets `ended_by` to it. If `until` is empty,
  // parses up to the end of the template.
  Result<std::vector<Statement>> parse_statements(const std::vector<std::string_view>& until, std::string& ended_by) {
    const DepthGuard depth_guard(depth_);
    if (depth_ > kDepthMax) return syntax_error(line(), "blocks are nested more than {} deep", kDepthMax);
    std::vector<Statement> body;
    while (true) {
      const Token& first = token();
      Statement statement{};
      statement.line = first.line;
      if (first.kind == Token::Kind::kText) {
        statement.kind = Statement::Kind::kText;
        statement.text = first.text;
        advance();
      } else if (first.kind == Token::Kind::kOutputBegin) {
        advance();
        statement.kind = Statement::Kind::kOutput;
        ECHO_ASSIGN(statement.expression, parse_expression());
        if (token().kind != Token::Kind::kOutputEnd)
          return syntax_error(line(), "expected }}}}, found {}", describe_token());
        advance();
      } else if (first.kind == Token::Kind::kTagBegin) {
        advance();
        ECHO_ASSIGN(const std::string tag, expect_name("the name of a tag"));
        if (std::find(until.begin(), until.end(), tag) != until.end()) {
          ended_by = tag;
          return body;
        }
        ECHO_TRY(parse_tag(tag, statement));
      } else if (until.empty()) {
        return body;
      } else {
        return syntax_error(first.line, "the template ends before {{% {} %}}", until.back());
      }
      body.push_back(std::move(statement));
    }
  }

  // Parses the rest of {% tag ... %}, and of its block if it has one, into `statement`.
  Status parse_tag(const std::string& tag, Statement& statement) {
    std::string ended_by;
    if (tag == "if") {
      statement.kind = Statement::Kind::kIf;
      for (ended_by = "if"; ended_by != "endif";) {
        Statement::Branch branch;
        const bool is_else = ended_by == "else";
        if (!is_else) {
          ECHO_ASSIGN(branch.condition, parse_expression());
        }
        ECHO_TRY(expect_tag_end());
        if (is_else) {
          ECHO_ASSIGN(branch.body, parse_statements({"endif"}, ended_by));
        } else {
          ECHO_ASSIGN(branch.body, parse_statements({"elif", "else", "endif"}, ended_by));
        }
        statement.branches.push_back(std::move(branch));
      }
    } else if (tag == "for") {
      statement.kind = Statement::Kind::kFor;
      do {
        ECHO_ASSIGN(std::string target, expect_name("a loop variable"));
        statement.targets.push_back(std::move(target));
      } while (consume(","));
      if (!consume_word("in")) return syntax_error(line(), "expected 'in', found {}", describe_token());
      ECHO_ASSIGN(statement.expression, parse_disjunction());
      if (consume_word("if")) {
        ECHO_ASSIGN(statement.condition, parse_expression());
      }
      ECHO_TRY(expect_tag_end());
      statement.branches.resize(2);
      ++loops_;
      ECHO_ASSIGN(statement.branches[0].body, parse_statements({"else", "endfor"}, ended_by));
      --loops_;
      if (ended_by == "else") {
        ECHO_TRY(expect_tag_end());
        ECHO_ASSIGN(statement.branches[1].body, parse_statements({"endfor"}, ended_by));
      }
    } else if (tag == "set") {
      statement.kind = Statement::Kind::kSet;
      ECHO_ASSIGN(std::string target, expect_name("a variable"));
      statement.targets.push_back(std::move(target));
      if (consume(".")) {
        ECHO_ASSIGN(statement.attribute, expect_name("an attribute"));
      }
      if (consume("=")) {
        ECHO_ASSIGN(statement.expression, parse_expression());
      } else if (statement.attribute.empty() && token().kind == Token::Kind::kTagEnd) {
        statement.kind = Statement::Kind::kSetText;
        ECHO_TRY(parse_block("endset", statement));
      } else {
        return syntax_error(line(), "expected {{% set NAME = VALUE %}} or {{% set NAME %}}, found {} after the name",
                            describe_token());
      }
    } else if (tag == "macro") {
      statement.kind = Statement::Kind::kMacro;
      ECHO_TRY(parse_macro_signature(statement));
      ECHO_TRY(parse_block_outside_loops("endmacro", statement));
    } else if (tag == "generation") {  // marks text of the model for trainers; its body is printed
      statement.kind = Statement::Kind::kScope;
      ECHO_TRY(parse_block_outside_loops("endgeneration", statement));
    } else if ((tag == "break" || tag == "continue") && loops_ > 0) {
      statement.kind = tag == "break" ? Statement::Kind::kBreak : Statement::Kind::kContinue;
    } else {
      return syntax_error(statement.line,
                          "the tag '{}' is not implemented; known: if, for, set, macro, generation, break, continue",
                          tag.substr(0, kNameBytesShown));
    }
    return expect_tag_end();
  }

  // Parses the end of a tag and the statements up to the tag `end`, and consumes the name of that tag.
  Status parse_block(std::string_view end, Statement& statement) {
    ECHO_TRY(expect_tag_end());
    std::string ended_by;
    ECHO_ASSIGN(auto body, parse_statements({end}, ended_by));
    statement.branches.push_back({nullptr, std::move(body)});
    return ok();
  }

  // Like parse_block(), but break and continue inside it do not refer to the loops around it.
  Status parse_block_outside_loops(std::string_view end, Statement& statement) {
    const std::size_t loops_outside = std::exchange(loops_, 0);
    ECHO_TRY(parse_block(end, statement));
    loops_ = loops_outside;
    return ok();
  }

  // Parses NAME(PARAMETER, PARAMETER = DEFAULT, ...).
  Status parse_macro_signature(Statement& statement) {
    ECHO_ASSIGN(std::string name, expect_name("the name of a macro"));
    statement.targets.push_back(std::move(name));
    ECHO_TRY(expect("("));
    while (!consume(")")) {
      ECHO_ASSIGN(std::string parameter, expect_name("a parameter"));
      statement.targets.push_back(std::move(parameter));
      if (consume("=")) {
        ECHO_ASSIGN(auto value, parse_expression());
        statement.defaults.push_back(std::move(value));
      } else if (!statement.defaults.empty()) {
        return syntax_error(line(), "a parameter without default follows one with a default");
      }
      if (!is_operator(")")) ECHO_TRY(expect(","));
    }
    return ok();
  }

  // A new node; fails if its tree is too deep.
  Result<Node> make_node(Kind kind, std::size_t line, std::string name, std::vector<Node> parts) {
    auto node = std::make_unique<Expression>();
    node->kind = kind;
    node->line = line;
    node->name = std::move(name);
    for (const Node& part : parts)
      if (part) node->depth = std::max(node->depth, part->depth + 1);
    if (node->depth > kDepthMax) return syntax_error(line, "an expression is nested more than {} deep", kDepthMax);
    node->parts = std::move(parts);
    return node;
  }
  template <class... Nodes>
  static std::vector<Node> node_list(Nodes... parts) {
    std::vector<Node> result;
    (result.push_back(std::move(parts)), ...);
    return result;
  }

  Result<Node> parse_expression() {
    const DepthGuard depth_guard(depth_);
    if (depth_ > kDepthMax) return syntax_error(line(), "an expression is nested more than {} deep", kDepthMax);
    ECHO_ASSIGN(Node node, parse_disjunction());
    while (is_word("if")) {
      const std::size_t start_line = line();
      advance();
      ECHO_ASSIGN(Node condition, parse_disjunction());
      Node alternative;
      if (consume_word("else")) {
        ECHO_ASSIGN(alternative, parse_expression());
      }
      ECHO_ASSIGN(node, make_node(Kind::kConditional, start_line, "if",
                                  node_list(std::move(condition), std::move(node), std::move(alternative))));
    }
    return node;
  }

  // Each of the next functions parses a left-associative chain of binary operators. Those of lower precedence come
  // first.
  Result<Node> parse_disjunction() {
    ECHO_ASSIGN(Node node, parse_conjunction());
    while (is_word("or")) {
      ECHO_TRY(parse_right_operand("or", node, &Parser::parse_conjunction));
    }
    return node;
  }
  Result<Node> parse_conjunction() {
    ECHO_ASSIGN(Node node, parse_negation());
    while (is_word("and")) {
      ECHO_TRY(parse_right_operand("and", node, &Parser::parse_negation));
    }
    return node;
  }
  Result<Node> parse_negation() {
    if (!is_word("not")) return parse_comparison();
    const DepthGuard depth_guard(depth_);
    if (depth_ > kDepthMax) return syntax_error(line(), "an expression is nested more than {} deep", kDepthMax);
    const std::size_t start_line = line();
    advance();
    ECHO_ASSIGN(Node node, parse_negation());
    return make_node(Kind::kNot, start_line, "not", node_list(std::move(node)));
  }
  std::optional<std::string> current_comparator() const {
    for (const char* symbol : {"==", "!=", "<", ">", "<=", ">="})
      if (is_operator(symbol)) return symbol;
    if (is_word("in")) return "in";
    const bool is_not_in =
        is_word("not") && tokens_[position_ + 1].kind == Token::Kind::kName && tokens_[position_ + 1].text == "in";
    return is_not_in ? std::optional<std::string>("not in") : std::nullopt;
  }
  Result<Node> parse_comparison() {
    ECHO_ASSIGN(Node node, parse_sum());
    const auto symbol = current_comparator();
    if (!symbol) return node;
    if (*symbol == "not in") advance();
    ECHO_TRY(parse_right_operand(*symbol, node, &Parser::parse_sum));
    if (current_comparator())
      return syntax_error(line(), "comparisons in a row are not implemented; join them with 'and'");
    return node;
  }
  Result<Node> parse_sum() {
    ECHO_ASSIGN(Node node, parse_concatenation());
    while (is_operator("+") || is_operator("-")) {
      ECHO_TRY(parse_right_operand(token().text, node, &Parser::parse_concatenation));
    }
    return node;
  }
  Result<Node> parse_concatenation() {
    ECHO_ASSIGN(Node node, parse_product());
    while (is_operator("~")) {
      ECHO_TRY(parse_right_operand("~", node, &Parser::parse_product));
    }
    return node;
  }
  Result<Node> parse_product() {
    ECHO_ASSIGN(Node node, parse_filtered_operand());
    while (is_operator("*") || is_operator("/") || is_operator("//") || is_operator("%")) {
      ECHO_TRY(parse_right_operand(token().text, node, &Parser::parse_filtered_operand));
    }
    if (is_operator("**")) return syntax_error(line(), "the operator '**' is not implemented");
    return node;
  }
  // An operand with its filters (`operand | name`) and tests (`operand is name`).
  Result<Node> parse_filtered_operand() { return parse_operand(/*with_filter=*/true); }

  // Replaces `node` by the binary expression of `node` and the operand that `operand` parses. The current token is the
  // operator, or its last word.
  Status parse_right_operand(std::string symbol, Node& node, Result<Node> (Parser::*operand)()) {
    const std::size_t start_line = line();
    advance();
    ECHO_ASSIGN(Node right, (this->*operand)());
    ECHO_ASSIGN(node,
                make_node(Kind::kBinary, start_line, std::move(symbol), node_list(std::move(node), std::move(right))));
    return ok();
  }

  // Parses an operand with its sign, attributes, subscripts and calls and, if `with_filter`, with its filters and
  // tests.
  Result<Node> parse_operand(bool with_filter) {
    const DepthGuard depth_guard(depth_);
    if (depth_ > kDepthMax) return syntax_error(line(), "an expression is nested more than {} deep", kDepthMax);
    Node node;
    const std::size_t start_line = line();
    if (consume("-")) {
      ECHO_ASSIGN(node, parse_operand(/*with_filter=*/false));
      ECHO_ASSIGN(node, make_node(Kind::kNegative, start_line, "-", node_list(std::move(node))));
    } else {
      ECHO_ASSIGN(node, parse_primary());
    }
    ECHO_TRY(parse_postfix(node));
    while (with_filter) {
      const std::size_t operator_line = line();
      if (consume("|")) {
        ECHO_ASSIGN(std::string filter, expect_name("the name of a filter"));
        std::vector<Node> parts = node_list(std::move(node));
        std::vector<std::string> keywords;
        if (is_operator("(")) ECHO_TRY(parse_arguments(parts, keywords));
        ECHO_ASSIGN(node, make_node(Kind::kFilter, operator_line, std::move(filter), std::move(parts)));
        node->keywords = std::move(keywords);
      } else if (consume_word("is")) {
        const bool is_negated = consume_word("not");
        ECHO_ASSIGN(std::string test, expect_name("the name of a test"));
        std::vector<Node> parts = node_list(std::move(node));
        std::vector<std::string> keywords;
        if (is_operator("(")) ECHO_TRY(parse_arguments(parts, keywords));
        ECHO_ASSIGN(node, make_node(Kind::kTest, operator_line, std::move(test), std::move(parts)));
        node->keywords = std::move(keywords);
        if (is_negated) {
          ECHO_ASSIGN(node, make_node(Kind::kNot, operator_line, "not", node_list(std::move(node))));
        }
      } else {
        break;
      }
    }
    return node;
  }

  // Extends `node` by the attributes, subscripts and calls that follow it.
  Status parse_postfix(Node& node) {
    while (true) {
      const std::size_t start_line = line();
      if (consume(".")) {
        ECHO_ASSIGN(std::string attribute, expect_name("an attribute"));
        ECHO_ASSIGN(node, make_node(Kind::kAttribute, start_line, std::move(attribute), node_list(std::move(node))));
      } else if (consume("[")) {
        ECHO_TRY(parse_subscript(node, start_line));
      } else if (is_operator("(")) {
        std::vector<Node> parts = node_list(std::move(node));
        std::vector<std::string> keywords;
        ECHO_TRY(parse_arguments(parts, keywords));
        ECHO_ASSIGN(node, make_node(Kind::kCall, start_line, "", std::move(parts)));
        node->keywords = std::move(keywords);
      } else {
        return ok();
      }
    }
  }

  // Extends `node` by [index] or [begin:end:step], after the opening bracket.
  Status parse_subscript(Node& node, std::size_t start_line) {
    std::vector<Node> parts = node_list(std::move(node));
    bool is_slice = false;
    for (int part = 0; part < 3; ++part) {
      Node slice_part;
      if (!is_operator(":") && !is_operator("]")) {
        ECHO_ASSIGN(slice_part, parse_expression());
      }
      parts.push_back(std::move(slice_part));
      if (!consume(":")) break;
      is_slice = true;
    }
    ECHO_TRY(expect("]"));
    if (!is_slice && !parts[1]) return syntax_error(start_line, "expected an index between [ and ]");
    if (is_slice) parts.resize(4);  // the object, begin, end and step; absent ones are null
    ECHO_ASSIGN(node, make_node(is_slice ? Kind::kSlice : Kind::kIndex, start_line, "", std::move(parts)));
    return ok();
  }

  // Parses (value, ..., name=value, ...): appends the values to `parts` and the names to `keywords`.
  Status parse_arguments(std::vector<Node>& parts, std::vector<std::string>& keywords) {
    ECHO_TRY(expect("("));
    while (!consume(")")) {
      const Token& next_token = tokens_[std::min(position_ + 1, tokens_.size() - 1)];
      const bool is_keyword =
          token().kind == Token::Kind::kName && next_token.kind == Token::Kind::kOperator && next_token.text == "=";
      if (is_keyword) {
        keywords.push_back(token().text);
        advance();
        advance();
      } else if (!keywords.empty()) {
        return syntax_error(line(), "an argument without name follows one with a name");
      }
      ECHO_ASSIGN(Node value, parse_expression());
      parts.push_back(std::move(value));
      if (!is_operator(")")) ECHO_TRY(expect(","));
    }
    return ok();
  }

  // A literal; consumes its last token.
  Result<Node> make_literal(Value value) {
    const std::size_t start_line = line();
    advance();
    ECHO_ASSIGN(Node node, make_node(Kind::kLiteral, start_line, "", {}));
    node->value = std::move(value);
    return node;
  }

  // Parses a literal, a name, (...), [...] or {...}.
  Result<Node> parse_primary() {
    const Token& current = token();
    const std::size_t start_line = current.line;
    switch (current.kind) {
      case Token::Kind::kInteger:
        return make_literal({static_cast<std::int64_t>(std::strtoll(current.text.c_str(), nullptr, 10))});
      case Token::Kind::kFloat:
        return make_literal({std::strtod(current.text.c_str(), nullptr)});
      case Token::Kind::kString: {
        std::string text = current.text;
        while (tokens_[position_ + 1].kind == Token::Kind::kString) {
          advance();
          text += token().text;
        }
        return make_literal({std::move(text)});
      }
      case Token::Kind::kName: {
        if (current.text == "true" || current.text == "True") return make_literal({true});
        if (current.text == "false" || current.text == "False") return make_literal({false});
        if (current.text == "none" || current.text == "None") return make_literal({None{}});
        std::string text = current.text;
        advance();
        return make_node(Kind::kName, start_line, std::move(text), {});
      }
      default:
        break;
    }
    std::vector<Node> parts;
    if (consume("(")) {
      bool is_tuple = is_operator(")");
      while (!consume(")")) {
        ECHO_ASSIGN(Node part, parse_expression());
        parts.push_back(std::move(part));
        if (is_operator(")")) continue;
        ECHO_TRY(expect(","));
        is_tuple = true;
      }
      if (!is_tuple) return std::move(parts.front());
      return make_node(Kind::kList, start_line, "", std::move(parts));
    }
    if (consume("[")) {
      while (!consume("]")) {
        ECHO_ASSIGN(Node part, parse_expression());
        parts.push_back(std::move(part));
        if (!is_operator("]")) ECHO_TRY(expect(","));
      }
      return make_node(Kind::kList, start_line, "", std::move(parts));
    }
    if (consume("{")) {
      while (!consume("}")) {
        ECHO_ASSIGN(Node key, parse_expression());
        ECHO_TRY(expect(":"));
        ECHO_ASSIGN(Node value, parse_expression());
        parts.push_back(std::move(key));
        parts.push_back(std::move(value));
        if (!is_operator("}")) ECHO_TRY(expect(","));
      }
      return make_node(Kind::kMapping, start_line, "", std::move(parts));
    }
    return syntax_error(start_line, "expected an expression, found {}", describe_token());
  }

  std::vector<Token> tokens_;
  std::size_t position_ = 0;           // index of the current token
  std::size_t depth_ = 0, loops_ = 0;  // levels of recursion; loops around the current token
};

}  // namespace

Result<std::vector<Statement>> parse_template(std::string_view text) {
  if (text.size() > kTemplateBytesMax)
    return fail(Code::kInvalid, "chat template", "{} bytes, expected at most {}", text.size(), kTemplateBytesMax);
  ECHO_ASSIGN(std::vector<Token> tokens, Lexer(text).lex());
  return Parser(std::move(tokens)).parse();
}

}  // namespace echoline::model::chat
