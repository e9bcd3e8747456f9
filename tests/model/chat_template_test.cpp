// Chat templates against Jinja's output with the settings of transformers, and the prompts made from them.
#include "model/chat_template.hpp"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "base/random.hpp"
#include "model/phrasing.hpp"
#include "tests/fuzz/input.hpp"

namespace echoline::model {
namespace {

const std::vector<ChatMessage> kTalk = {
    {"system", "Be brief."}, {"user", "  2+2? "}, {"assistant", "<think>\nhm\n</think>\n\n4"}, {"user", "é"}};

std::string rendered(
    std::string_view text, const std::vector<ChatMessage>& messages = kTalk, bool prompt = true,
    std::string_view variables = R"({"bos_token": "<s>", "n": 3, "d": {"b": [1, 2.5, null], "a": "é"}})") {
  const auto parsed = ChatTemplate::parse(text);
  if (!parsed) return "PARSE " + parsed.error().detail;
  const auto out = parsed->render(messages, prompt, variables);
  return out ? *out : "RENDER " + out.error().detail;
}

// Features of Qwen 3's template: a namespace, slices from behind, methods of strings, nested conditions.
constexpr const char* kThinking = R"({%- if tools %}
    {{- "# Tools" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and not(message.content.startswith('<tool>') and
                                                           message.content.endswith('</tool>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content and loop.index0 < ns.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}
        {%- if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
)";

TEST(ChatTemplate, AThinkingModelsTemplate) {
  const std::string talk =
      "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n  2+2? <|im_end|>\n"
      "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\né<|im_end|>\n";
  EXPECT_EQ(rendered(kThinking), talk + "<|im_start|>assistant\n");
  EXPECT_EQ(rendered(kThinking, kTalk, false), talk);
  EXPECT_EQ(rendered(kThinking, kTalk, true, R"({"enable_thinking": false})"),
            talk + "<|im_start|>assistant\n<think>\n\n</think>\n\n");
}

TEST(ChatTemplate, ATemplateOfHeadersAndTrimmedTexts) {
  const char* text =
      "{{- bos_token }}\n{%- if not date_string is defined %}\n    {%- if strftime_now is defined %}\n"
      "        {%- set date_string = strftime_now('%d %b %Y') %}\n    {%- else %}\n"
      "        {%- set date_string = '26 Jul 2024' %}\n    {%- endif %}\n{%- endif %}\n"
      "{#- The system message goes first. #}\n{%- if messages[0]['role'] == 'system' %}\n"
      "    {%- set system_message = messages[0]['content']|trim %}\n    {%- set messages = messages[1:] %}\n"
      "{%- else %}\n    {%- set system_message = '' %}\n{%- endif %}\n"
      "{{- '<|h|>system<|/h|>\\n\\nToday: ' + date_string + '\\n\\n' }}\n{{- system_message }}\n{{- '<|eot|>' }}\n"
      "{%- for message in messages %}{% set content = '<|h|>' + message['role'] + '<|/h|>\\n\\n'+ message['content'] | "
      "trim "
      "+ '<|eot|>' %}{% if loop.index0 == 0 %}{% set content = '[' ~ loop.length ~ ']' + content %}{% endif %}"
      "{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|h|>assistant<|/h|>\\n\\n' }}{% endif %}\n";
  EXPECT_EQ(rendered(text),
            "<s><|h|>system<|/h|>\n\nToday: 26 Jul 2024\n\nBe brief.<|eot|>[3]<|h|>user<|/h|>\n\n2+2?<|eot|>"
            "<|h|>assistant<|/h|>\n\n<think>\nhm\n</think>\n\n4<|eot|><|h|>user<|/h|>\n\né<|eot|>"
            "<|h|>assistant<|/h|>\n\n");
}

TEST(ChatTemplate, WhiteSpaceGoesAsTransformersHasIt) {
  EXPECT_EQ(rendered("a\n  {% if true %}\n  b\n  {% endif %}\nc\n"), "a\n  b\nc");
  EXPECT_EQ(rendered("  {{ 1 }}  \n{{ 2 }}\n\n"), "  1  \n2\n");
  EXPECT_EQ(rendered("a {%- if true -%} \n b {% endif %}c"), "ab c");
  EXPECT_EQ(rendered("a\n  {%+ if true %}b{% endif %}"), "a\n  b");
  EXPECT_EQ(rendered("a\n {# note #}\nb{#- note -#}\n c"), "a\nbc");
  EXPECT_EQ(rendered("x\r\ny\rz"), "x\ny\nz");
  EXPECT_EQ(rendered("{% if true +%}\nb{% endif %}"), "\nb");
}

TEST(ChatTemplate, Expressions) {
  const std::pair<const char*, const char*> cases[] = {
      {"n + 2 * 3 - 1", "8"},
      {"-7 // 2 ~ ' ' ~ -7 % 3 ~ ' ' ~ 7 / 2", "-4 2 3.5"},
      {"'a' 'b' + \"c\\n\\u00e9\\x41\\q\"", "abc\n\u00e9A\\q"},
      {"[1, 2, 3][-1] ~ 'héllo'[1] ~ 'héllo'[::-2] ~ [1,2,3,4][1:3]|join(',')", "3éolh2,3"},
      {"d.b[2] is none and d['a'] is string and d is mapping and d.b is sequence and n is number", "True"},
      {"d | tojson", R"({"b": [1, 2.5, null], "a": "é"})"},
      {"d.zzz is defined or 1 > 2 or 'b' not in d", "False"},
      {"'yes' if n >= 3 else 'no'", "yes"},
      {"'' if n", ""},
      {"'gone' if false", ""},
      {"missing", ""},
      {"missing|default('d') ~ ''|default('e', true) ~ none|default('f')", "deNone"},
      {"not false and not (true and false)", "True"},
      {"true == 1 and 'a' < 'b' and [1, 'a'] == [1, 'a'] and {'x': 1} == {'x': 1}", "True"},
      {"' x '.strip() ~ 'xxa'.lstrip('x') ~ 'a,b'.split(',')|last ~ 'a b  c'.split()|length", "xab3"},
      {"'aXa'.replace('X', '--').upper() ~ 'é'|length ~ d.items()|list|length ~ d.get('q', 9)", "A--A129"},
      {"-1|string + '\u3000y\u00a0'|trim", "-1y"},
      {"messages|length ~ messages[1:]|length ~ (messages|first).role", "43system"},
  };
  for (const auto& [expression, expected] : cases)
    EXPECT_EQ(rendered(fmt::format("{{{{ {} }}}}", expression)), expected) << expression;
}

TEST(ChatTemplate, LoopsAndScopes) {
  EXPECT_EQ(rendered("{% set x = 1 %}{% for i in [1,2,3] %}{% set x = x + i %}{{ x }}{% endfor %}{{ x }}"), "2341");
  EXPECT_EQ(rendered("{% for i in [1,2,3,4] if i % 2 == 0 %}{{ loop.index }}{{ i }}{{ loop.last }} {% endfor %}"),
            "12False 24True ");
  EXPECT_EQ(rendered("{% for k, v in d.items() %}{{ k }}{% else %}none{% endfor %}"), "ba");
  EXPECT_EQ(rendered("{% for i in missing %}x{% else %}none{% endfor %}"), "none");
  EXPECT_EQ(
      rendered("{% for i in [1,2,3,4] %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}"
               "{% endfor %}"),
      "13");
  EXPECT_EQ(
      rendered("{% set ns = namespace(a=1) %}{% for i in [1,2] %}{% set ns.a = ns.a + i %}{% endfor %}{{ ns.a }}"),
      "4");
}

TEST(ChatTemplate, MacrosSeeTheirParametersAndTheOutermostVariables) {
  const std::string macro =
      "{% macro m(a, b='B', c=n) -%} {{ a }}{{ b }}{{ c }}{{ i is defined }}{% set x = 9 %} {%- endmacro %}{% set x = "
      "1 "
      "%}";
  EXPECT_EQ(rendered(macro + "{{ m('A') }} {{ m('A', c=2) }} {{ m(b=1, a=2) }} {{ x }}"),
            "AB3False AB2False 213False 1");
  EXPECT_EQ(rendered(macro + "{% for i in [7] %}{{ m(i) }}{{ i }}{% endfor %}"), "7B3False7");
  EXPECT_EQ(rendered(macro + "{{ m() }}"), "B3False");
  EXPECT_EQ(rendered("{% macro down(k) %}{{ k }}{% if k > 0 %}{{ down(k - 1) }}{% endif %}{% endmacro %}{{ down(3) }}"),
            "3210");
  EXPECT_EQ(rendered("{% macro f(k) %}<{{ k }}>{% endmacro %}{% set text = f(1) ~ f(2) %}{{ text | length }}"), "6");
  EXPECT_EQ(rendered("{% macro f() %}{% endmacro %}{{ f(1) }}"),
            "RENDER line 1: the macro 'f' has 0 parameters, found 1 arguments");
  EXPECT_EQ(rendered("{% macro f(k) %}{% endmacro %}{{ f(j=1) }}"),
            "RENDER line 1: the macro 'f' has no parameter 'j'");
}

TEST(ChatTemplate, BlocksOfText) {
  EXPECT_EQ(rendered("a{% generation %}{{ n }}{% set n = 4 %}{{ n }}{% endgeneration %}{{ n }}"), "a343");
  EXPECT_EQ(rendered("{% for i in [1, 2] %}{% generation %}{{ i }}{% endgeneration %}{% endfor %}"), "12");
  EXPECT_EQ(rendered("{% set x %}<{{ n }}>{% endset %}{{ x }}{{ x | length }}"), "<3>3");
}

TEST(ChatTemplate, FiltersOfLists) {
  EXPECT_EQ(rendered("{{ messages | map(attribute='role') | join(' ') }}"), "system user assistant user");
  EXPECT_EQ(rendered("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}"), "2");
  EXPECT_EQ(rendered("{{ messages | rejectattr('role', 'in', ['user', 'system']) | first | tojson | length > 0 }}"),
            "True");
  EXPECT_EQ(rendered("{{ messages | selectattr('tool_calls') | list | length }}"), "0");
  EXPECT_EQ(rendered("{% for k, v in d | dictsort %}{{ k }}{% endfor %}"), "ab");
  EXPECT_EQ(rendered("{{ 'uSER' | capitalize }} {{ 'a b'.capitalize() }} {{ 'aba' | replace('a', 'c') }}"),
            "User A b cbc");
}

TEST(ChatTemplate, Ranges) {
  EXPECT_EQ(rendered("{{ range(3) | join(',') }} {{ range(1, 3) | join(',') }} {{ range(5, 0, -2) | join(',') }}"),
            "0,1,2 1,2 5,3,1");
  EXPECT_EQ(rendered("{{ range(3, 0) | list | length }}"), "0");
  EXPECT_EQ(rendered("{{ range(1, 2, 0) }}"), "RENDER line 1: the step of range() is 0");
  EXPECT_EQ(rendered("{{ range(999999999999) }}").substr(0, 6), "RENDER");
}

TEST(ChatTemplate, TheDateIsGiven) {
  const auto dated = [](std::string_view text, std::string_view date) {
    return rendered(text, kTalk, true, fmt::format(R"({{"strftime_now": "{}"}})", date));
  };
  EXPECT_EQ(dated("{{ strftime_now('%d %b %Y, %A') }}", "2026-11-27"), "27 Nov 2026, Friday");
  EXPECT_EQ(dated("{{ strftime_now is defined }}", "2026-11-27"), "True");
  for (const char* wrong : {"", "27.11.2026", "2026-11-27 12:00"})
    EXPECT_NE(dated("{{ strftime_now('%Y') }}", wrong).find("set task.chat_options"), std::string::npos) << wrong;
}

TEST(ChatTemplate, UnsupportedFeaturesAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"a\n{% call f() %}{% endcall %}", "PARSE line 2: the tag 'call'"},
      {"{{ 'x' | wordwrap }}", "the filter 'wordwrap'"},
      {"{{ 'x'.center(3) }}", "the method 'center'"},
      {"{{ 'x' is divisibleby(3) }}", "the test 'is divisibleby'"},
      {"{{ strftime_now('%Y') }}", "set task.chat_options: {strftime_now: \"YYYY-MM-DD\"}"},
      {"{{ raise_exception('only ' + messages[0].role) }}", "refuses these messages: only system"},
      {"{{ missing.x }}", "cannot take '.x' of 'missing', which is undefined"},
      {"{{ 1 + 'a' }}", "cannot compute an integer + a string"},
      {"{{ [1] }}", "printing a list is not implemented"},
      {"{{ 1 // 0 }}", "division by zero"},
      {"{{ 9223372036854775807 + 1 }}", "PARSE line 1: the number"},
      {"{% if x %}", "the template ends before {% endif %}"},
      {"{% endif %}", "the tag 'endif'"},
      {"{{ (1 }}", "PARSE line 1"},
      {"{{ 'x }}", "a string is not closed"},
      {"{# x", "a comment is not closed"},
      {"{{ 1 < 2 < 3 }}", "comparisons in a row"},
      {"{{ 2 ** 3 }}", "'**' is not implemented"},
      {"{{ 4 is divisibleby(num=2) }}", "the test 'is divisibleby' with named arguments is not implemented"},
      {"{% set a, b = 1, 2 %}", "expected {% set NAME = VALUE %}"},
      {"{% set x = 1 %}{% set x.y = 2 %}", "'x' is not a namespace"},
      {"{{ '\\ud800' }}", "malformed escape"},
      {"{{ $ }}", "unexpected character 0x24"},
  };
  for (const auto& [text, expected] : cases) {
    const std::string found = rendered(text);
    EXPECT_NE(found.find(expected), std::string::npos) << text << " gave " << found;
  }
}

TEST(ChatTemplate, NothingGrowsWithoutBound) {
  const auto limited = [](const std::string& text) { return rendered(text).substr(0, 6); };
  EXPECT_EQ(limited("{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}" +
                    [] {
                      std::string s;
                      for (int i = 0; i < 40; ++i) s += "{% set ns.x = ns.x + ns.x %}";
                      return s;
                    }()),
            "RENDER");
  std::string loops = "{% set l = 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa'|list %}", ends;
  for (int i = 0; i < 8; ++i) {
    loops += fmt::format("{{% for i{} in l %}}", i);
    ends += "{% endfor %}";
  }
  EXPECT_EQ(limited(loops + ends), "RENDER");
  std::string nested = "{% set x = [] %}";
  for (int i = 0; i < 1000; ++i) nested += "{% set x = [x] %}";
  EXPECT_EQ(limited(nested), "RENDER");
  EXPECT_EQ(limited("{% set ns = namespace() %}{% set ns.x = [ns] %}"), "RENDER");
  EXPECT_EQ(limited("{{ " + std::string(100'000, '(')), "PARSE ");
  EXPECT_EQ(limited("{{ " + std::string(100'000, '-') + "1 }}"), "PARSE ");
  std::string sum = "{{ 1";
  for (int i = 0; i < 10'000; ++i) sum += "+1";
  EXPECT_EQ(limited(sum + " }}"), "PARSE ");
  std::string blocks;
  for (int i = 0; i < 10'000; ++i) blocks += "{% if 1 %}";
  EXPECT_EQ(limited(blocks), "PARSE ");
  EXPECT_EQ(limited(std::string((1 << 20) + 1, 'x')), "PARSE ");
  EXPECT_EQ(limited("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "RENDER");
  EXPECT_EQ(limited("{% macro f(k) %}{{ f([k]) }}{% endmacro %}{{ f(1) }}"), "RENDER");
}

TEST(ChatTemplate, AnyBytesAreHandled) {
  Random random(1, 2);
  const std::string pieces[] = {
      "{% ",  " %}",  "{{ ", " }}",      "{#",   "#}",  "if ",    "else ",    "endif ", "for x in ", "endfor",
      "set ", "x",    "=",   "messages", "[",    "]",   ":",      "(",        ")",      "|",         "tojson",
      ".",    "role", "'a'", "1",        "-",    "+",   "~",      " in ",     "not ",   "namespace", "ns",
      ",",    "{",    "}",   "\n",       "loop", "is ", "macro ", "endmacro", "x()"};
  std::vector<std::string> seeds = {kThinking};
  for (int round = 0; round < 3000; ++round) {
    std::string text = round % 3 == 0 ? std::string(kThinking) : "";
    if (text.empty())
      for (std::uint64_t i = 0; i < 30; ++i) text += pieces[random.below(std::size(pieces))];
    else
      for (int i = 0; i < 3; ++i) text[random.below(text.size())] = static_cast<char>(random.below(256));
    test::fuzz_input(text);
  }
}

ModelFiles files(std::string_view chat_template = "") {
  ModelFiles made = ModelFiles::of_preset("bytes-64").value();
  if (!chat_template.empty()) made.chat_template = chat_template;
  return made;
}

TEST(Phrasing, AResponseEndsWithATokenOrAStopString) {
  PromptStyle style;
  style.stop = {"</a>", "zz"};
  const Phrasing made = Phrasing::make(files(), style).value();
  const Phrasing phrasing = Phrasing::from_parts(made.tokenizer(), made.eos(), made.prompt_json()).value();
  const auto tokens = [&](std::string_view text) { return phrasing.tokenizer().encode(text).value(); };
  struct Case {
    std::string text, answer;
    std::optional<std::size_t> end;  // characters are tokens
  };
  for (const Case& c : std::vector<Case>{{"no", "no", std::nullopt},
                                         {"<a>7</a>", "<a>7</a>", 8},
                                         {"7</a>more", "7</a>", 5},
                                         {"zzz", "zz", 2},
                                         {"</a", "</a", std::nullopt},
                                         {"7<|endoftext|>", "7", 2},
                                         {"7</a><|endoftext|>", "7</a>", 5},
                                         {"7<|endoftext|></a>", "7", 2},
                                         {"", "", std::nullopt}}) {
    EXPECT_EQ(phrasing.response_end(tokens(c.text)), c.end) << c.text;
    EXPECT_EQ(phrasing.answer(tokens(c.text)), c.answer) << c.text;
    // Token by token, as an engine calls it.
    const auto all = tokens(c.text);
    std::optional<std::size_t> first;
    for (std::size_t n = 1; n <= all.size() && !first; ++n)
      first = phrasing.response_end(std::span(all).first(n), n - 1);
    EXPECT_EQ(first, c.end) << c.text;
  }
  for (const char* stop :
       {R"([""])", R"([1])", R"("x")", R"(["01234567890123456789012345678901234567890123456789012345678901234"])"})
    EXPECT_FALSE(Phrasing::from_parts(made.tokenizer(), made.eos(),
                                      std::string(R"({"text": "{prompt}", "stop": )") + stop + "}"))
        << stop;
}

TEST(Phrasing, FormsPromptsInOneWayEverywhere) {
  PromptStyle style;
  EXPECT_EQ(Phrasing::make(files(), style)->prompt_text("1+1=").value(), "1+1=");
  style.text = "Q: {prompt}\nA:";
  EXPECT_EQ(Phrasing::make(files(), style)->prompt_text("1+1={prompt}").value(), "Q: 1+1={prompt}\nA:");
  style.chat = true;
  style.system = "Count.";
  style.chat_options_json = R"({"mark": "!"})";
  const Phrasing phrasing =
      Phrasing::make(files("{{ eos_token }}{% for m in messages %}{{ m.role }}>{{ m.content }}|{% endfor %}{{ mark }}"),
                     style)
          .value();
  EXPECT_EQ(phrasing.prompt_text("2").value(), "<|endoftext|>system>Count.|user>Q: 2\nA:|!");
  EXPECT_EQ(phrasing.prompt("2")->front(), 256) << "special tokens of a template are tokens";
  // A Phrasing made from the parts that a worker receives makes the same prompts.
  const Phrasing told = Phrasing::from_parts(phrasing.tokenizer(), phrasing.eos(), phrasing.prompt_json()).value();
  EXPECT_EQ(told.prompt("2").value(), phrasing.prompt("2").value());
  EXPECT_EQ(told.prompt_json(), phrasing.prompt_json());
}

TEST(Phrasing, ObservationsContinueThePresentTokens) {
  const auto text = [](const Phrasing& phrasing, std::string_view response, std::string_view told) {
    return phrasing.tokenizer().decode(*phrasing.follow_up(*phrasing.tokenizer().encode(response), told));
  };
  PromptStyle style;
  EXPECT_EQ(text(Phrasing::make(files(), style).value(), "7<|endoftext|>", "no"), "\nno\n");
  style.turn = "\nQ: {observation}\nA:";
  EXPECT_EQ(text(Phrasing::make(files(), style).value(), "7", "no"), "\nQ: no\nA:");
  style.chat = true;
  style.system = "Count.";
  ModelFiles with = files(
      "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
      "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}");
  with.eos = {256, 258};
  const Phrasing made = Phrasing::make(with, style).value();
  const Phrasing phrasing = Phrasing::from_parts(made.tokenizer(), made.eos(), made.prompt_json()).value();
  const std::string after = "\n<|im_start|>user\n(any response)<|im_end|>\n<|im_start|>assistant\n";
  EXPECT_EQ(text(phrasing, "7<|im_end|>", "(any response)"), after) << "its ending token is present";
  EXPECT_EQ(text(phrasing, "7", "(any response)"), "<|im_end|>" + after)
      << "its ending token is missing, because the turn was cut";
  EXPECT_EQ(text(phrasing, "7<|endoftext|>", "(any response)"), "<|im_end|>" + after);
  style.turn = "nowhere";
  EXPECT_FALSE(Phrasing::make(with, style));
  const Phrasing forgetful = Phrasing::make(files("{{ messages[-1].content }}"),
                                            [] {
                                              PromptStyle s;
                                              s.chat = true;
                                              return s;
                                            }())
                                 .value();
  EXPECT_FALSE(forgetful.follow_up({}, "no")) << "its template does not show earlier messages";
}

TEST(Phrasing, MessagesKeepTheirRoles) {
  const PolicyInput question(std::vector<ChatMessage>{{"user", "Hi"}, {"assistant", "Yes?"}, {"user", "2+2"}});
  const PolicyInput result(std::vector<ChatMessage>{{"tool", "four"}, {"user", "Sure?"}});
  PromptStyle style;
  style.text = "Q: {prompt}";
  const Phrasing plain = Phrasing::make(files(), style).value();
  EXPECT_EQ(plain.prompt_text(question).value(), "Q: Hi\n\nYes?\n\n2+2");
  EXPECT_EQ(plain.tokenizer().decode(*plain.follow_up({}, result)), "\nfour\n\nSure?\n");
  style.chat = true;
  style.system = "Count.";
  const Phrasing chat =
      Phrasing::make(files("{% for m in messages %}{{ m.role }}>{{ m.content }}|{% endfor %}"), style).value();
  EXPECT_EQ(chat.prompt_text(question).value(), "system>Count.|user>Hi|assistant>Yes?|user>Q: 2+2|");
  const PolicyInput own(std::vector<ChatMessage>{{"system", "Think."}, {"user", "2+2"}, {"tool", "four"}});
  EXPECT_EQ(chat.prompt_text(own).value(), "system>Think.|user>2+2|tool>four|")
      << "its own system message, and no question around a result";
  EXPECT_EQ(chat.tokenizer().decode(*chat.follow_up({}, result)), "|tool>four|user>Sure?|");
}

TEST(Phrasing, RefusesInvalidStyles) {
  const auto refused = [](const ModelFiles& with, PromptStyle style, const char* says) {
    const auto made = Phrasing::make(with, style);
    ASSERT_FALSE(made) << says;
    EXPECT_EQ(made.error().code, Code::kInvalid);
    EXPECT_NE(made.error().detail.find(says), std::string::npos) << made.error().detail;
  };
  PromptStyle chat, no_place, no_chat;
  chat.chat = true;
  no_place.text = "no place";
  no_chat.system = "x";
  refused(files(), no_place, "{prompt}");
  refused(files(), no_chat, "task.chat");
  refused(files("{{ messages | wordwrap }}"), chat, "wordwrap");
  refused(files("{% if %}"), chat, "line 1");
  ModelFiles without = files();
  without.chat_template.reset();
  refused(without, chat, "no chat template");
  EXPECT_FALSE(Phrasing::from_parts(files().tokenizer, {}, R"({"text": "{prompt}"})"));
  EXPECT_FALSE(Phrasing::from_parts(files().tokenizer, {1}, "{}"));
}

TEST(Phrasing, TheAnswerExcludesOnlyItsEndingToken) {
  ModelFiles with = files();
  with.eos = {256, 258};
  const Phrasing phrasing = Phrasing::make(with, {}).value();
  EXPECT_EQ(phrasing.answer(std::vector<Token>{'4', '2', 258}), "42");
  EXPECT_EQ(phrasing.answer(std::vector<Token>{'4', '2', 256}), "42");
  EXPECT_EQ(phrasing.answer(std::vector<Token>{'4', '2'}), "42");
  EXPECT_EQ(phrasing.answer(std::vector<Token>{'4', 257, '2', 258}), "4<|im_start|>2");
  EXPECT_EQ(phrasing.answer(std::vector<Token>{256}), "");
  EXPECT_EQ(phrasing.answer({}), "");
}

// A model of bytes encodes any text; the alphabet of the tiny presets does not.
TEST(Presets, BytesEncodeAnyLanguage) {
  const std::string text = "Janet\u2019s ducks cost \u00a35 \U0001f986\n";
  const ModelFiles bytes = files(), characters = ModelFiles::of_preset("tiny-64").value();
  EXPECT_FALSE(characters.tokenizer.encode(text));
  const auto tokens = bytes.tokenizer.encode(text);
  ASSERT_TRUE(tokens) << tokens.error().message();
  EXPECT_EQ(tokens->size(), text.size());
  EXPECT_EQ(bytes.tokenizer.decode(*tokens), text);
  EXPECT_EQ(bytes.config.vocab_size, bytes.tokenizer.size());
  EXPECT_EQ(bytes.eos, (std::vector<Token>{*bytes.tokenizer.end_of_text()}));
}

}  // namespace
}  // namespace echoline::model
