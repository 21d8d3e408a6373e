// Labels of the page of a recording.
const WORDS = {
  en: {
    result: "result", equal: "equal", differs: "differs", engine: "engine", ranks: "ranks", replicas: "replicas", stages: "pipeline stages", precision: "rounding measured in", versions: "versions",
    equalLine: "The recorded steps equal one device.", differsLine: "The recorded steps differ from one device.",
    findings: "First difference", what: "what", module: "module", amount: "differs by", limit: "limit", cause: "likely cause", why: "explanation", whole: "the whole model",
    steps: "Compared steps", step: "step", microBatches: "micro-batches", norm: "gradient norm", loss: "loss of one device", recordedLoss: "recorded loss", labels: "labels", recordedLabels: "recorded labels", outputs: "outputs", output: "largest difference",
    gradients: "gradients", gradient: "largest difference", at: "at", updates: "updates", update: "largest difference", notes: "Notes",
    keys: "Keys: <kbd>l</kbd> language, <kbd>t</kbd> theme", made: (version, folder) => `meshwright ${version}; ${folder}; differences are relative to the norm on one device in float64`,
    light: "light", dark: "dark", auto: "auto", other: "中文",
  },
  zh: {
    result: "结果", equal: "一致", differs: "不一致", engine: "引擎", ranks: "rank 数", replicas: "副本", stages: "流水线阶段", precision: "测量舍入的精度", versions: "版本",
    equalLine: "记录的各步与单设备一致。", differsLine: "记录的各步与单设备不一致。",
    findings: "第一个差异", what: "对象", module: "模块", amount: "差异", limit: "限值", cause: "可能的原因", why: "说明", whole: "整个模型",
    steps: "比较过的步", step: "步", microBatches: "微批数", norm: "梯度范数", loss: "单设备损失", recordedLoss: "记录的损失", labels: "标签数", recordedLabels: "记录的标签数", outputs: "输出", output: "最大差异",
    gradients: "梯度", gradient: "最大差异", at: "位置", updates: "更新", update: "最大差异", notes: "备注",
    keys: "按键：<kbd>l</kbd> 语言，<kbd>t</kbd> 主题", made: (version, folder) => `meshwright ${version}；${folder}；差异相对于单设备 float64 的范数`,
    light: "浅色", dark: "深色", auto: "自动", other: "English",
  },
}
