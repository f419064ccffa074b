{{- define "loraplex.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "loraplex.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "loraplex.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "loraplex.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "loraplex.selectorLabels" -}}
app.kubernetes.io/name: {{ include "loraplex.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "loraplex.labels" -}}
{{ include "loraplex.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "loraplex.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "loraplex.fullname" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "loraplex.image" -}}
{{- $repository := required "image.repository: give the image that has loraplex" .Values.image.repository -}}
{{- printf "%s:%s" $repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}

{{- define "loraplex.modelName" -}}
{{- first (append .Values.model.names (base .Values.model.path)) -}}
{{- end -}}

{{- define "loraplex.keysSecret" -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- .Values.apiKeys.existingSecret -}}
{{- else if .Values.apiKeys.content -}}
{{- printf "%s-keys" (include "loraplex.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "loraplex.scheme" -}}
{{- ternary "HTTPS" "HTTP" (ne .Values.tls.existingSecret "") -}}
{{- end -}}

{{- define "loraplex.check" -}}
{{- if and .Values.apiKeys.existingSecret .Values.apiKeys.content -}}
{{- fail "apiKeys: give existingSecret or content, not both" -}}
{{- end -}}
{{- if not (or (include "loraplex.keysSecret" .) .Values.apiKeys.allowNone) -}}
{{- fail "apiKeys: give existingSecret or content, or set allowNone: every pod that reaches the server may then use it" -}}
{{- end -}}
{{- $claims := and .Values.state.persistence (eq .Values.kind "Deployment") -}}
{{- if and $claims (or (gt (int .Values.replicas) 1) .Values.autoscaling.enabled) -}}
{{- fail "state.persistence: replicas of a Deployment would share one claim; a state folder belongs to one server: use kind StatefulSet" -}}
{{- end -}}
{{- $shared := .Values.adapters.declarations -}}
{{- if and $shared.existingClaim (not (hasPrefix "/" $shared.place)) -}}
{{- fail "adapters.declarations.place: give the folder at which existingClaim is mounted" -}}
{{- end -}}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) -}}
{{- fail "inferencePool.endpointPicker.name: give the service of the endpoint picker" -}}
{{- end -}}
{{- end -}}

{{/* The text of a setting: numbers are floats in Helm, and large ones must not become 1e+06. */}}
{{- define "loraplex.text" -}}
{{- if kindIs "slice" . -}}
{{- join "," . -}}
{{- else if kindIs "float64" . -}}
{{- if eq (float64 (int64 .)) . }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- else -}}
{{- . -}}
{{- end -}}
{{- end -}}

{{- define "loraplex.args" -}}
- serve
- {{ required "model.path: give a folder, such as /mnt/models, or a hub id" .Values.model.path | quote }}
- --host=0.0.0.0
- --http-port={{ .Values.ports.http }}
- --grpc-port={{ .Values.ports.grpc }}
- --metrics-port={{ .Values.ports.metrics }}
- --state-dir={{ .Values.state.mountPath }}
- --shutdown-seconds={{ .Values.shutdown.graceSeconds }}
{{- range .Values.model.names }}
- {{ printf "--served-model-name=%s" . | quote }}
{{- end }}
{{- if gt (int .Values.parallel.tensorParallelSize) 1 }}
- --tensor-parallel-size={{ .Values.parallel.tensorParallelSize }}
{{- end }}
{{- if gt (int .Values.parallel.pipelineParallelSize) 1 }}
- --pipeline-parallel-size={{ .Values.parallel.pipelineParallelSize }}
{{- end }}
{{- if include "loraplex.keysSecret" . }}
- {{ printf "--api-keys-file=/etc/loraplex/keys/%s" .Values.apiKeys.fileName | quote }}
{{- else }}
- --allow-no-keys
{{- end }}
{{- if .Values.tls.existingSecret }}
- --tls-cert=/etc/loraplex/tls/tls.crt
- --tls-key=/etc/loraplex/tls/tls.key
{{- end }}
{{- if .Values.adapters.declared }}
- --multi-lora=/etc/loraplex/adapters/multi_lora.json
{{- end }}
{{- if .Values.adapters.existingClaim }}
- {{ printf "--adapter-dir=%s" .Values.adapters.mountPath | quote }}
{{- end }}
{{- with .Values.adapters.declarations.place }}
- {{ printf "--adapter-declarations=%s" . | quote }}
{{- end }}
{{- range .Values.adapters.allowedHosts }}
- {{ printf "--allowed-adapter-hosts=%s" . | quote }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "loraplex.aibrixLabels" -}}
{{- if .Values.aibrix.enabled -}}
model.aibrix.ai/name: {{ include "loraplex.modelName" . | quote }}
model.aibrix.ai/engine: vllm
model.aibrix.ai/port: {{ .Values.ports.http | quote }}
model.aibrix.ai/metric-port: {{ .Values.ports.metrics | quote }}
adapter.model.aibrix.ai/enabled: "true"
{{- end -}}
{{- end -}}

{{- define "loraplex.claim" -}}
accessModes:
  {{- toYaml .Values.state.accessModes | nindent 2 }}
{{- with .Values.state.storageClassName }}
storageClassName: {{ . }}
{{- end }}
resources:
  requests:
    storage: {{ .Values.state.size }}
{{- end -}}

{{- define "loraplex.endpoint" -}}
interval: {{ .Values.monitor.interval }}
path: /metrics
scheme: {{ include "loraplex.scheme" . | lower }}
{{- if .Values.tls.existingSecret }}
tlsConfig:
  insecureSkipVerify: true
{{- end }}
{{- with .Values.monitor.authorization.secretName }}
authorization:
  credentials:
    name: {{ . }}
    key: {{ $.Values.monitor.authorization.secretKey }}
{{- end }}
{{- end -}}

{{/* Peers of a network policy; without any: the pods of the namespace. */}}
{{- define "loraplex.peers" -}}
{{- if . }}
{{- toYaml . }}
{{- else }}
- podSelector: {}
{{- end }}
{{- end -}}
