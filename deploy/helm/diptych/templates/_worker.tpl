{{/*
The pod of a worker, or of a further host of it (node: true), whose command is `diptych rank`.
Arguments: root, role, node.
*/}}
{{- define "diptych.workerPod" -}}
{{- $root := .root }}
{{- $role := .role }}
{{- $node := .node }}
{{- $v := index $root.Values $role }}
{{- $ranks := mul $v.tensorParallel $v.pipelineParallel | int }}
metadata:
  labels:
    {{- include "diptych.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $role }}
  {{- if not $node }}
  annotations:
    {{- include "diptych.scrape" (dict "root" $root "port" $root.Values.worker.metricsPort) | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "diptych.serviceAccount" $root }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  # The drain, and some seconds to close engine and transfer.
  terminationGracePeriodSeconds: {{ add $v.drainSeconds 20 }}
  {{- if $root.Values.worker.hostIPC }}
  hostIPC: true
  {{- end }}
  securityContext:
    {{- include "diptych.podSecurity" $root | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- include "diptych.spread" (dict "root" $root "component" $role) | nindent 2 }}
  {{- with $v.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ if $node }}rank{{ else }}{{ $role }}{{ end }}
      image: "{{ $root.Values.image.repository }}:{{ $root.Values.image.tag }}"
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        {{- if $node }}
        - rank
        # LeaderWorkerSet sets this variable: the name of the group's first pod.
        - --master-addr=$(LWS_LEADER_ADDRESS)
        - --host=$(POD_IP)
        {{- else }}
        - {{ $role }}
        - --worker-id=$(POD_NAME)
        - --host=$(POD_IP)
        - --port={{ $root.Values.worker.grpcPort }}
        - --metrics-host=0.0.0.0
        - --metrics-port={{ $root.Values.worker.metricsPort }}
        - --drain-s={{ $v.drainSeconds }}
        {{- if gt (int $v.nodes) 1 }}
        - --master-addr=$(POD_IP)
        {{- end }}
        {{- end }}
        {{- if gt (int $v.nodes) 1 }}
        - --nnodes={{ $v.nodes }}
        {{- end }}
        {{- if gt $ranks 1 }}
        - --tensor-parallel-size={{ $v.tensorParallel }}
        - --pipeline-parallel-size={{ $v.pipelineParallel }}
        {{- end }}
        {{- if and $root.Values.worker.diskKv.enabled (not $node) }}
        - --disk-kv-dir=/kv
        {{- end }}
        {{- if not $root.Values.worker.tlsSecret }}
        - --insecure
        {{- end }}
        {{- if not $node }}
        {{- range $v.extraArgs }}
        - {{ . | quote }}
        {{- end }}
        {{- end }}
      env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        {{- if $node }}
        - name: NODE_RANK
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
        {{- end }}
        {{- include "diptych.environment" (dict "root" $root "toml" (ternary "" "worker.toml" $node)) | nindent 8 }}
        {{- include "diptych.clusterTls" $root | nindent 8 }}
        {{- with $v.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not $node }}
      ports:
        - {name: grpc, containerPort: {{ $root.Values.worker.grpcPort }}}
        - {name: metrics, containerPort: {{ $root.Values.worker.metricsPort }}}
      # grpc.health.v1 is NOT_SERVING while the model loads and warms up, while the engine makes no progress, and in a drain.
      startupProbe:
        {{- include "diptych.workerProbe" $root | nindent 8 }}
        periodSeconds: 5
        failureThreshold: 120
      readinessProbe:
        {{- include "diptych.workerProbe" $root | nindent 8 }}
        periodSeconds: {{ if $root.Values.worker.tlsSecret }}10{{ else }}3{{ end }}
      livenessProbe:
        {{- include "diptych.workerProbe" $root | nindent 8 }}
        periodSeconds: 10
        failureThreshold: 6
      {{- end }}
      resources:
        {{- $resources := deepCopy $v.resources }}
        {{- $more := deepCopy $root.Values.worker.extraResources }}
        {{- if $v.gpus }}
        {{- $more = merge $more (dict "nvidia.com/gpu" $v.gpus) }}
        {{- end }}
        {{- if $more }}
        {{- $resources = merge $resources (dict "limits" dict) }}
        {{- $_ := set $resources "limits" (merge $resources.limits $more) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- include "diptych.containerSecurity" $root | nindent 8 }}
        {{- if $root.Values.worker.ipcLock }}
          add: [IPC_LOCK]
        {{- end }}
      volumeMounts:
        - {name: secrets, mountPath: /run/secrets/diptych, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        - {name: shm, mountPath: /dev/shm}
        {{- if and $root.Values.worker.diskKv.enabled (not $node) }}
        - {name: kv, mountPath: /kv}
        {{- end }}
        {{- include "diptych.clusterTlsMount" $root | nindent 8 }}
        {{- if $root.Values.models.existingClaim }}
        - {name: models, mountPath: {{ $root.Values.models.mountPath }}, readOnly: true}
        {{- end }}
  volumes:
    - name: secrets
      secret:
        secretName: {{ include "diptych.secret" $root }}
        items:
          - {key: cluster_secret, path: cluster_secret}
          {{- if not $node }}
          - {key: worker.toml, path: worker.toml}
          {{- end }}
    - {name: tmp, emptyDir: {}}
    {{- include "diptych.clusterTlsVolume" $root | nindent 4 }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $v.shmSize }}}}
    {{- if and $root.Values.worker.diskKv.enabled (not $node) }}
    - {name: kv, emptyDir: {sizeLimit: {{ $root.Values.worker.diskKv.sizeLimit }}}}
    {{- end }}
    {{- if $root.Values.models.existingClaim }}
    - {name: models, persistentVolumeClaim: {claimName: {{ $root.Values.models.existingClaim }}, readOnly: true}}
    {{- end }}
{{- end -}}
