"""Chat templates in the styles of models that think and call tools, without the rest of the published ones."""

MARKS = "<|im_start|> <|im_end|> <|endoftext|> <|system|> <|user|> <|assistant|> <|observation|> <|start|> <|end|> <|message|>"
MARKS += " <|channel|> <|return|> <|call|> <|User|> <|Assistant|> <|eos|>"


def jinja(text: str) -> str:
    """A template that is written on several lines, with blocks that occur more than once."""
    text = text.replace("LAST", LAST).replace("SPLIT", SPLIT)
    return "".join(map(str.strip, text.splitlines()))


# the last message of the user
LAST = """{% set n = namespace(user=0) %}
{% for m in messages %}{% if m.role == 'user' %}{% set n.user = loop.index0 %}{% endif %}{% endfor %}"""
# thoughts have a field, or stand before the answer
SPLIT = """{% set thoughts, said = m.reasoning_content or '', m.content %}
{% if '</think>' in said %}
{% set thoughts, said = said.split('</think>')[0].split('<think>')[-1].strip(), said.split('</think>')[-1].lstrip() %}
{% endif %}"""
QWEN3 = jinja(r"""
{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}LAST
{% for m in messages %}{{ '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\n' }}
  {% if m.role == 'assistant' %}SPLIT
    {% if loop.index0 > n.user and (loop.last or thoughts) %}{{ '<think>\n' + thoughts + '\n</think>\n\n' }}{% endif %}{{ said }}
    {% for c in m.tool_calls or [] %}{{ '\n' if said or not loop.first }}
      {{ '<tool_call>{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + '}</tool_call>' }}
    {% endfor %}
  {% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
  {% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{% endif %}""")
GLM = jinja(r"""
{% if tools %}{{ '<|system|>' + tools | tojson }}{% endif %}LAST
{% for m in messages %}
  {% if m.role == 'assistant' %}SPLIT
    {{ '<|assistant|>\n<think>' + (thoughts if loop.index0 > n.user else '') + '</think>' }}{{ '\n' + said if said }}
    {% for c in m.tool_calls or [] %}{{ '\n<tool_call>' + c.function.name }}
      {% for k, v in c.function.arguments.items() %}
        {{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' + v + '</arg_value>' }}
      {% endfor %}{{ '\n</tool_call>' }}
    {% endfor %}
  {% else %}{{ '<|observation|>' if m.role == 'tool' else '<|user|>' }}{{ '\n' + m.content }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|assistant|>{% endif %}""")
GPT_OSS = jinja(r"""
<|start|>system<|message|>{{ strftime_now('%Y-%m-%d') }}<|end|>
{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{% for m in messages %}
  {% if m.role == 'assistant' %}
    {% if m.thinking and (loop.last or m.tool_calls) %}
      {{ '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
    {% endif %}
    {% for c in m.tool_calls or [] %}
      {{ '<|start|>assistant to=' + c.function.name + '<|message|>' + c.function.arguments | tojson + '<|call|>' }}
    {% else %}
      {{ '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
    {% endfor %}
  {% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|start|>assistant{% endif %}""")
DEEPSEEK = jinja(r"""
{% if tools %}{{ tools | tojson }}{% endif %}
{% for m in messages %}
  {% if m.role == 'user' %}{{ '<|User|>' + m.content }}
  {% elif m.role == 'assistant' %}
    {{ '<|Assistant|></think>' if messages[loop.index0 - 1].role == 'user' }}{{ m.content.split('</think>')[-1] }}
    {% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '<sep>' + c.function.arguments + '</call>' }}{% endfor %}
    {{ '<|eos|>' }}
  {% else %}{{ '<output>' + m.content + '</output>' }}{% endif %}
{% endfor %}
{% if add_generation_prompt and messages[-1].role == 'user' %}
  <|Assistant|>{{ '<think>' if thinking else '</think>' }}
{% endif %}""")
# refuse results without the call before them, as gpt-oss's and Mistral's published templates do
STRICT = """{% if m.role == 'tool' %}{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}
<|start|>functions.{{ m.name }} to=assistant<|message|>{{ m.content }}<|end|>{% continue %}{% endif %}"""
STRICT_OSS = GPT_OSS.replace("{% for m in messages %}", "{% for m in messages %}" + jinja(STRICT), 1)
