{{- define "diptych.name" -}}
{{- printf "%s-diptych" .Release.Name | replace "diptych-diptych" "diptych" | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "diptych.labels" -}}
app.kubernetes.io/name: diptych
app.kubernetes.io/part-of: diptych
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "diptych.selector" -}}
app.kubernetes.io/name: diptych
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "diptych.secret" -}}
{{- default (include "diptych.name" .) .Values.secrets.existingSecret -}}
{{- end -}}

{{- define "diptych.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "diptych.name" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "diptych.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "diptych.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "diptych.scrape" -}}
{{- if .root.Values.metrics.annotations }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .port | quote }}
prometheus.io/path: /metrics
{{- end }}
{{- end -}}

{{- define "diptych.environment" -}}
{{- with .toml }}
- {name: DIPTYCH_CONFIG, value: /run/secrets/diptych/{{ . }}}
{{- end }}
- {name: DIPTYCH_SECRET_FILE, value: /run/secrets/diptych/cluster_secret}
- {name: DIPTYCH_CLUSTER, value: {{ .root.Values.cluster | quote }}}
- {name: DIPTYCH_MODEL, value: {{ .root.Values.model | quote }}}
{{- with .root.Values.servedModelName }}
- {name: DIPTYCH_SERVED_MODEL_NAME, value: {{ . | quote }}}
{{- end }}
- {name: HOME, value: /tmp}
{{- with .root.Values.tracing.otlpEndpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- end -}}

{{- define "diptych.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "diptych.selector" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "diptych.clusterTls" -}}
{{- if .Values.worker.tlsSecret -}}
# Variables, not flags: the probes' short process reads them, too.
- {name: DIPTYCH_CLUSTER_CA, value: /run/secrets/cluster-tls/ca.crt}
- {name: DIPTYCH_CLUSTER_CERT, value: /run/secrets/cluster-tls/tls.crt}
- {name: DIPTYCH_CLUSTER_KEY, value: /run/secrets/cluster-tls/tls.key}
- {name: DIPTYCH_CLUSTER_TLS_NAME, value: {{ .Values.worker.tlsName | quote }}}
{{- end -}}
{{- end -}}

{{- define "diptych.clusterTlsMount" -}}
{{- if .Values.worker.tlsSecret -}}
- {name: cluster-tls, mountPath: /run/secrets/cluster-tls, readOnly: true}
{{- end -}}
{{- end -}}

{{- define "diptych.clusterTlsVolume" -}}
{{- if .Values.worker.tlsSecret -}}
- {name: cluster-tls, secret: {secretName: {{ .Values.worker.tlsSecret }}}}
{{- end -}}
{{- end -}}

{{- define "diptych.workerProbe" -}}
{{- if .Values.worker.tlsSecret -}}
# The kubelet's gRPC probe speaks no TLS: the worker's own certificate asks, with one short process.
exec:
  command: [sh, -c, 'exec python -m diptych.cli.health "$POD_IP:{{ .Values.worker.grpcPort }}"']
timeoutSeconds: 10
{{- else -}}
grpc: {port: {{ .Values.worker.grpcPort }}}
{{- end -}}
{{- end -}}
