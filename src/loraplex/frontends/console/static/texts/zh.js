// 简体中文
export const texts = {
  shell: {
    screens: "页面",
    skip: "跳到内容",
    ready: "就绪",
    gone: "无法连接服务器。",
    unknown: "状态未知",
    loading: "正在加载……",
    again: "重试",
    age: "{seconds} 秒前",
    cancel: "取消",
    close: "关闭",
    copied: "已复制",
    invisible: "不可见字符",
    language: "语言",
    theme: "主题",
    system: "跟随系统",
    light: "浅色",
    dark: "深色",
    keys: "键盘",
    keySearch: "搜索",
    keyRun: "运行",
    keyStop: "停止",
    keyRows: "下一行与上一行",
    signOut: "退出",
    newer: "服务器有更新的控制台。",
    reload: "重新加载",
  },
  signIn: {
    title: "登录",
    key: "API 密钥",
    wrong: "服务器不认识这个密钥。",
    keep: "保留到关闭此标签页",
    where: "密钥只留在此标签页，只发送给此服务器。",
    enter: "登录",
  },
  playground: {
    title: "试验场",
  },
  adapters: {
    title: "适配器",
  },
  upload: {
    title: "上传",
  },
  live: {
    title: "实时",
  },
  requests: {
    title: "请求",
  },
  settings: {
    title: "设置",
  },
};
