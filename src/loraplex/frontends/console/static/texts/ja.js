// 日本語
export const texts = {
  shell: {
    screens: "画面",
    skip: "本文へ移動",
    ready: "準備完了",
    gone: "サーバーに接続できません。",
    unknown: "状態不明",
    loading: "読み込み中……",
    again: "再試行",
    age: "{seconds} 秒前",
    cancel: "キャンセル",
    close: "閉じる",
    copied: "コピーしました",
    invisible: "見えない文字",
    language: "言語",
    theme: "テーマ",
    system: "システム",
    light: "ライト",
    dark: "ダーク",
    keys: "キーボード",
    keySearch: "検索",
    keyRun: "実行",
    keyStop: "停止",
    keyRows: "次の行と前の行",
    signOut: "サインアウト",
    newer: "サーバーに新しいコンソールがあります。",
    reload: "再読み込み",
  },
  signIn: {
    title: "サインイン",
    key: "API キー",
    wrong: "サーバーはこのキーを知りません。",
    keep: "このタブを閉じるまで保持する",
    where: "キーはこのタブにだけ残り、このサーバーにだけ送られます。",
    enter: "サインイン",
  },
  playground: {
    title: "プレイグラウンド",
  },
  adapters: {
    title: "アダプター",
  },
  upload: {
    title: "アップロード",
  },
  live: {
    title: "ライブ",
  },
  requests: {
    title: "リクエスト",
  },
  settings: {
    title: "設定",
  },
};
